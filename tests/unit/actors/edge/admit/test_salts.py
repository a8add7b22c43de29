"""Tenants do not share cached prompts, and cannot detect each other's; sharing needs both sides' consent."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.actors.edge.admit.control import ANONYMOUS, CacheSalts, Principal, namespace_key
from headwater.actors.edge.settings import AccessSettings
from headwater.events.memory import MemoryTable
from headwater.ops.operator.keys import WantedKey
from headwater.schemas import hashing
from headwater.schemas.clock import SystemClock
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.edge import EVERYTHING, EdgeWorld

CHAT: Final = "/v1/chat/completions"
PUBLIC: Final = "You are the assistant of Acme Corp."
LONG: Final = "Tell me about the headwaters of a river. " * 8


def messages(system: str | None, user: str = LONG) -> list[dict[str, Any]]:
    """A conversation that begins with a system prompt."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": user}]


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeWorld]:
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "acme.txt").write_text(PUBLIC)
    with EdgeWorld(access=AccessSettings("keys", shared_prompts_dir=str(folder))) as world:
        world.serve("vectors", capabilities=frozenset({"embed", "cache_salt"}), tasks=("embed",))
        yield world


def ask(edge: EdgeWorld, key: str, turns: list[dict[str, Any]], **fields: Any) -> tuple[str, bytes, Any]:
    """The salt that the engine got, the block hashes that the router got, and the usage that the client got."""
    body = {"model": "m", "max_tokens": 2, "messages": turns, **fields}
    response = edge.ask(CHAT, body, headers=[(b"x-api-key", key.encode())])
    assert response.status == 200, response.body
    hidden = b"x-headwater-cached-blocks" not in response.headers
    assert hidden is ("prompt_tokens_details" not in response.document["usage"])
    return edge.given[-1].cache_salt, edge.queries[-1].hashes, response.document["usage"]


def test_tenants_with_one_prompt_have_no_block_in_common(edge: EdgeWorld) -> None:
    """Neither the engine's cache nor the router's index can match, so neither time nor usage tells."""
    a, again, b = (edge.create_key(WantedKey(tenant)) for tenant in ("a", "a", "b"))
    salt_a, hashes_a, usage = ask(edge, a, messages(None))
    assert ask(edge, again, messages(None))[:2] == (salt_a, hashes_a)
    salt_b, hashes_b, _ = ask(edge, b, messages(None))
    assert salt_a != salt_b
    assert len(salt_a) == len(salt_b) == 43
    ours, theirs = (set(hashing.unpack_hashes(one).tolist()) for one in (hashes_a, hashes_b))
    assert len(ours) > 3
    assert not ours & theirs
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_client_cannot_choose_the_salt_of_another_tenant(edge: EdgeWorld) -> None:
    a, b = edge.create_key(WantedKey("a")), edge.create_key(WantedKey("b"))
    salt_a, _, _ = ask(edge, a, messages(None))
    chosen, _, _ = ask(edge, b, messages(None), cache_salt=salt_a)
    assert chosen not in (salt_a, ask(edge, b, messages(None))[0])
    # Of one tenant, equal salts are equal, and others are others.
    assert ask(edge, b, messages(None), cache_salt=salt_a)[0] == chosen
    assert ask(edge, a, messages(None), cache_salt=salt_a)[0] != chosen


def test_pooled_prompts_are_salted_too(edge: EdgeWorld) -> None:
    for tenant in ("a", "b"):
        key = edge.create_key(WantedKey(tenant))
        edge.ask("/v1/embeddings", {"model": "vectors", "input": "x"}, headers=[(b"x-api-key", key.encode())])
    first, second = (request.cache_salt for request in edge.embedded[-2:])
    assert len(first) == len(second) == 43
    assert first != second


def test_sharing_needs_the_operators_prompt_and_the_keys_consent(edge: EdgeWorld) -> None:
    def key(tenant: str, *, shares: bool) -> str:
        return edge.create_key(WantedKey(tenant, cache_sharing=shares))

    a, b, c = key("a", shares=True), key("b", shares=True), key("c", shares=False)
    shared_a, _, usage = ask(edge, a, messages(PUBLIC))
    assert shared_a == ask(edge, b, messages(PUBLIC))[0]
    # What was cached may be another tenant's: it is not disclosed.
    assert "prompt_tokens_details" not in usage
    own = [ask(edge, c, messages(PUBLIC)), ask(edge, a, messages(None)), ask(edge, a, messages(PUBLIC + "!"))]
    own += [
        ask(edge, a, messages(PUBLIC), cache_salt="mine"),
        ask(edge, a, [{"role": "user", "content": PUBLIC}]),
    ]
    assert all(salt != shared_a for salt, _, _ in own)
    assert all("prompt_tokens_details" in usage for _, _, usage in own)


def test_without_authentication_salts_are_the_clients_own() -> None:
    with EdgeWorld() as edge:
        body = {"model": "m", "max_tokens": 2, "messages": messages(None)}
        assert edge.ask(CHAT, body).status == 200
        assert edge.ask(CHAT, {**body, "cache_salt": "mine"}).status == 200
        assert [request.cache_salt for request in edge.given] == ["", "mine"]


@pytest.mark.parametrize(("hide", "hidden"), [("never", False), ("shared", False), ("always", True)])
def test_cached_tokens_can_be_hidden(hide: Any, hidden: bool) -> None:
    with EdgeWorld(access=AccessSettings("keys", hide_cached_tokens=hide)) as edge:
        usage = ask(edge, edge.create_key(WantedKey("a")), messages(None))[2]
        assert ("prompt_tokens_details" not in usage) is hidden


def test_the_operator_can_permit_engines_without_salts() -> None:
    with EdgeWorld(access=AccessSettings("keys", allow_unsalted_engines=True)) as edge:
        edge.serve("unsalted", capabilities=EVERYTHING - {"cache_salt"})
        key = edge.create_key(WantedKey("a"))
        body = {"model": "unsalted", "max_tokens": 2, "messages": messages(None)}
        response = edge.ask(CHAT, body, headers=[(b"x-api-key", key.encode())])
        assert response.status == 200
        assert "prompt_tokens_details" not in response.document["usage"]


async def test_edges_of_a_namespace_have_one_key_and_namespaces_have_others() -> None:
    table, other = MemoryTable(ManualClock()), MemoryTable(ManualClock())
    key = await namespace_key(table)
    assert len(key) == 32
    assert await namespace_key(table) == key
    assert await namespace_key(other) != key


SALTS: Final[dict[str, CacheSalts]] = {}


async def loaded() -> CacheSalts:
    """Salts of one namespace."""
    if not SALTS:
        clock = SystemClock()
        salts = CacheSalts()
        await salts.load(MemoryTable(clock), clock)
        SALTS["one"] = salts
    return SALTS["one"]


@given(*(st.text(max_size=8) for _ in range(4)))
@example("ab", "c", "a", "bc")
@example("a", "", "", "a")
async def test_no_two_pairs_of_tenant_and_salt_share_one(a: str, x: str, b: str, y: str) -> None:
    """Text cannot be moved between the tenant's name and the client's salt."""
    salts = await loaded()
    card: Any = type("Card", (), {"capabilities": ("cache_salt",), "name": "m", "engine": "e"})
    first, second = (
        salts.salt_of(Principal(tenant, "key-1"), card, salt).value for tenant, salt in ((a, x), (b, y))
    )
    assert (first == second) == ((a, x) == (b, y))


def test_a_salt_without_a_key_is_an_error_not_a_salt() -> None:
    card: Any = type("Card", (), {"capabilities": ("cache_salt",), "name": "m", "engine": "e"})
    with pytest.raises(RuntimeError, match="namespace key"):
        CacheSalts().salt_of(Principal("a", "key-1"), card)
    assert CacheSalts().salt_of(ANONYMOUS, card).value == ""


def test_shared_prompts_are_read_as_they_are(tmp_path: Path) -> None:
    from headwater.actors.edge.admit.control import read_shared_prompts

    (tmp_path / "b.txt").write_text(" two\n")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.md").write_text("three")
    assert read_shared_prompts(str(tmp_path)) == ["one", " two\n"]
    assert read_shared_prompts("") == []
