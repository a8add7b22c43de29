"""Verification of API keys: expiry, rotation, revocation, records of other releases, comparison in constant time."""

import ast
import inspect
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from headwater.actors.edge.admit import control
from headwater.actors.edge.admit.control import KeyRing, PresentedKey, digest_of, key_text, parse_key
from headwater.actors.http.errors import ApiError
from headwater.actors.runtime.tables import ApiKeyTable
from headwater.events.memory import MemoryTable
from headwater.ops.operator.keys import WantedKey, new_key, with_new_secret
from headwater.schemas.tables import ApiKey
from tests.support.worlds.clock import ManualClock, running


class Ring:
    """A key ring that follows a table."""

    def __init__(self, clock: ManualClock, ring: KeyRing, table: MemoryTable) -> None:
        self.clock = clock
        self.ring = ring
        self.raw = table
        self.table = ApiKeyTable(table)

    @property
    def now_s(self) -> int:
        """Wall time in whole seconds."""
        return self.clock.wall_ns() // 1_000_000_000

    async def create(self, **wanted: Any) -> tuple[ApiKey, str]:
        """A key that the ring knows, and its secret."""
        key, text = new_key(WantedKey("acme", **wanted), self.now_s)
        assert await self.table.create(key)
        await self.clock.advance(0.0)
        return key, text

    def accepts(self, key: ApiKey, text: str) -> bool:
        """Whether a secret is accepted."""
        try:
            return self.ring.verify(PresentedKey(key.id, text.encode())).tenant == key.tenant
        except ApiError as error:
            return error.status != 401


@pytest.fixture
async def ring() -> AsyncIterator[Ring]:
    clock = ManualClock()
    table = MemoryTable(clock)
    made = KeyRing(table, clock)
    async with running(made.run()):
        await made.known.wait()
        yield Ring(clock, made, table)


async def test_a_key_is_its_whole_secret(ring: Ring) -> None:
    key, text = await ring.create()
    other, other_text = await ring.create()
    assert ring.accepts(key, text)
    assert not ring.accepts(key, other_text)
    assert not ring.accepts(other, text)
    for place in range(0, 64, 7):
        changed = "0" if text[place] != "0" else "1"
        assert not ring.accepts(key, text[:place] + changed + text[place + 1 :])


async def test_an_expired_key_is_refused_from_that_second_on(ring: Ring) -> None:
    key, text = await ring.create(expires_in_s=60)
    await ring.clock.advance(59.0)
    assert ring.accepts(key, text)
    await ring.clock.advance(1.0)
    assert not ring.accepts(key, text)


async def test_a_rotated_secret_is_accepted_for_the_grace_period(ring: Ring) -> None:
    key, old = await ring.create()
    found = await ring.table.get(key.id)
    assert found is not None
    rotated, new = with_new_secret(found[0], 100, ring.now_s)
    assert await ring.table.replace(rotated, found[1])
    await ring.clock.advance(0.0)
    assert ring.accepts(key, old)
    assert ring.accepts(key, new)
    # Rotated again without grace: neither of the earlier ones.
    last, newest = with_new_secret(rotated, 0, ring.now_s)
    await ring.clock.advance(100.0)
    assert not ring.accepts(key, old)
    assert ring.accepts(key, new)
    found = await ring.table.get(key.id)
    assert found is not None
    assert await ring.table.replace(last, found[1])
    await ring.clock.advance(0.0)
    assert [ring.accepts(key, one) for one in (old, new, newest)] == [False, False, True]


async def test_a_second_rotation_does_not_prolong_the_first_secret(ring: Ring) -> None:
    key, _ = await ring.create()
    once, _ = with_new_secret(key, 10, 1000)
    twice, _ = with_new_secret(once, 500, 1005)
    assert [one.until_s for one in twice.digests] == [0, 1505, 1010]
    later, _ = with_new_secret(once, 500, 1010)
    assert [one.until_s for one in later.digests] == [0, 1510]


async def test_a_revoked_key_is_refused(ring: Ring) -> None:
    key, text = await ring.create()
    await ring.table.delete(key.id)
    await ring.clock.advance(0.0)
    assert not ring.accepts(key, text)


async def test_a_record_that_cannot_be_read_is_no_key(ring: Ring) -> None:
    """It fails closed: what was known under the id before is forgotten."""
    key, text = await ring.create()
    with capture_logs() as logs:
        await ring.raw.put(key.id, b'{"id": 7}')
        await ring.clock.advance(0.0)
    assert [entry["event"] for entry in logs] == ["api_key_unreadable"]
    assert not ring.accepts(key, text)


async def test_a_record_under_another_id_is_no_key(ring: Ring) -> None:
    key, text = await ring.create()
    await ring.raw.put("0" * 12, msgspec.json.encode(key))
    await ring.clock.advance(0.0)
    assert not ring.accepts(msgspec.structs.replace(key, id="0" * 12), text)


async def test_permissions_of_a_later_release_do_not_make_a_key_unreadable(ring: Ring) -> None:
    key, text = await ring.create()
    document = msgspec.to_builtins(key)
    document["scopes"]["permissions"] = ["tier", "something-new"]
    document["new_field"] = 1
    await ring.raw.put(key.id, msgspec.json.encode(document))
    await ring.clock.advance(0.0)
    principal = ring.ring.verify(PresentedKey(key.id, text.encode()))
    assert principal.permits("tier")
    assert not principal.permits("worker")


async def test_the_table_holds_no_secret(ring: Ring) -> None:
    key, text = await ring.create()
    entry = await ring.raw.get(key.id)
    assert entry is not None
    assert entry.value is not None
    assert text.encode() not in entry.value
    assert digest_of(key.id, text.encode()).encode() in entry.value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hw-",
        "hw-0123456789ab",
        "hw-0123456789ab_" + "0" * 64,
        "hw-0123456789ab-" + "0" * 63,
        "hw-0123456789ab-" + "0" * 65,
        "xhw-0123456789ab-" + "0" * 64,
        "hw-0123456789ab-" + "0" * 64 + "\n",
    ],
)
def test_only_one_form_is_a_key(text: str) -> None:
    assert parse_key(text.encode()) is None


def test_a_digest_belongs_to_one_key() -> None:
    """The digest of one key's secret is of no use in another record."""
    assert digest_of("0" * 12, b"s") == digest_of("0" * 12, b"s") != digest_of("1" * 12, b"s")


def test_a_key_survives_its_text() -> None:
    key, text = new_key(WantedKey("acme"), 0)
    assert parse_key(key_text(key.id, text).encode()) == PresentedKey(key.id, text.encode())


def test_digests_are_compared_in_constant_time() -> None:
    """Structural: verification compares digests by `hmac.compare_digest` and by nothing else, for every secret."""
    tree = ast.parse(inspect.getsource(control.KeyRing))
    [verify] = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "verify"
    ]
    compared = [ast.unparse(node) for node in ast.walk(verify) if isinstance(node, ast.Compare)]
    assert all("digest" not in one for one in compared), compared
    [loop] = [node for node in ast.walk(verify) if isinstance(node, ast.For)]
    # It looks at every secret, whichever matches, and at one for an unknown id.
    assert not any(isinstance(node, ast.Break | ast.Return) for node in ast.walk(loop))
    assert "NO_DIGESTS" in ast.unparse(loop.iter)
    assert any("hmac.compare_digest" in ast.unparse(node) for node in loop.body)
