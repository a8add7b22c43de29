"""What a tenant learns of another one's prompts from a fleet: nothing. Two runs that differ in them alone look alike.

Virtual time is exact, so that is what is compared: when each byte arrived, from which worker, and what usage says.
"""

import asyncio
import random
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from headwater.actors.edge.admit.control import key_text
from headwater.actors.edge.settings import AccessSettings
from headwater.actors.runtime.tables import ApiKeyTable
from headwater.ops.operator.keys import WantedKey, new_key
from headwater.ops.sim import loop
from headwater.ops.sim.fleet import POOL, SimFleet, names
from headwater.ops.sim.loop import VirtualLoop
from headwater.schemas.subjects import SALT_KEY
from tests.sim.disaggregated import serving

PROMPT_TOKENS: Final = 1_024
"""Two steps of prefill, and two thirds of a worker's cache."""

ROUNDS: Final = 3
ENGINES: Final = 3
PAUSE_S: Final = 2.0
"""Until the router has heard of the blocks that a request left behind."""

KEYS: Final = {tenant: new_key(WantedKey(tenant), 0) for tenant in ("a", "b")}
"""The same in all runs, as their ids are in what is compared."""


class Seen(NamedTuple):
    """What a client can see of one request, but for its id."""

    ttft_s: float
    total_s: float
    worker: bytes
    cached_blocks: bytes
    usage: dict[str, Any]


def prompt(number: int) -> list[int]:
    """One of many prompts, of equal length."""
    draw = random.Random(f"prompt {number}")
    return [draw.randrange(64) for _ in range(PROMPT_TOKENS)]


async def ask(fleet: SimFleet, tenant: str, tokens: list[int], *, keys: bool) -> Seen:
    """One streamed request of a tenant."""
    key, secret = KEYS[tenant]
    credential = (b"x-api-key", key_text(key.id, secret).encode())
    headers = [credential if keys else (b"x-headwater-tenant", tenant.encode())]
    body = {"model": "sim", "prompt": tokens, "max_tokens": 3, "ignore_eos": True, "seed": 1}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    began = fleet.loop.time()
    connection = fleet.servers["edge-0"].connect(
        "/v1/completions", msgspec.json.encode(body | stream), headers
    )
    data, first = b"", 0.0
    while (part := await connection.part()) is not None:
        first = first or fleet.loop.time()
        data += part
    connection.hang_up()
    assert connection.status == 200, data
    *_, last, _done = data.strip().split(b"\n\n")
    return Seen(
        first - began,
        fleet.loop.time() - began,
        connection.headers[b"x-headwater-worker"],
        connection.headers[b"x-headwater-cached-blocks"],
        msgspec.json.decode(last.removeprefix(b"data: "))["usage"],
    )


async def _run(clock: VirtualLoop, of_a: list[int], *, keys: bool) -> tuple[list[Seen], list[Seen]]:
    """Tenant `a` sends prompts, each twice, and after each of them `b` sends its own; returns what each saw."""
    access = AccessSettings("keys") if keys else None
    fleet = SimFleet(
        clock,
        random.Random("network"),
        lambda *_: None,
        names("engine", ENGINES),
        names("router", 1),
        names("edge", 1),
        access=access,
    )
    table = ApiKeyTable(fleet.store.api_keys)
    for key, _ in KEYS.values():
        await table.create(key)
    await fleet.store.secrets.create(SALT_KEY, b"11" * 32)
    async with serving(fleet):
        while "edge-0" not in fleet.servers or not fleet.servers["edge-0"].listening.is_set():
            await asyncio.sleep(0.1)
        while fleet.edge("edge-0").workers(POOL) != ENGINES:
            await asyncio.sleep(0.1)
        await asyncio.sleep(PAUSE_S)
        seen: dict[str, list[Seen]] = {"a": [], "b": []}
        for number in range(ROUNDS):
            for tenant, tokens in (("a", of_a[number]), ("a", of_a[number]), ("b", number)):
                seen[tenant].append(await ask(fleet, tenant, prompt(tokens), keys=keys))
                await asyncio.sleep(PAUSE_S)
        await fleet.stop()
    return seen["a"], seen["b"]


def run(of_a: list[int], *, keys: bool) -> tuple[list[Seen], list[Seen]]:
    """See `_run`."""
    return loop.run(lambda clock: _run(clock, of_a, keys=keys))


SAME: Final = list(range(ROUNDS))
"""`a` has just sent what `b` sends."""

OTHER: Final = [100 + number for number in range(ROUNDS)]


@pytest.mark.timeout(120)
def test_nothing_that_a_tenant_sees_depends_on_what_another_one_sent() -> None:
    """Neither times, nor usage, nor where the router sends it: whether `a` sent the same prompts or others."""
    a, b = run(SAME, keys=True)
    _, control = run(OTHER, keys=True)
    assert b == control
    # It was a cold prompt each time, and to its own tenant a warm one.
    for number in range(ROUNDS):
        cold, warm, others = a[2 * number], a[2 * number + 1], b[number]
        assert (cold.cached_blocks, others.cached_blocks) == (b"0", b"0")
        assert int(warm.cached_blocks) > PROMPT_TOKENS // 16 - 2
        assert warm.worker == cold.worker
        assert others.usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm.usage["prompt_tokens_details"]["cached_tokens"] > PROMPT_TOKENS - 32
        assert warm.ttft_s < 0.6 * min(cold.ttft_s, others.ttft_s)


@pytest.mark.timeout(120)
def test_without_keys_a_tenant_would_see_it() -> None:
    """The same comparison finds a shared cache: in time, in usage and in where a request is sent."""
    a, b = run(SAME, keys=False)
    _, control = run(OTHER, keys=False)
    for number in range(ROUNDS):
        assert b[number].worker == a[2 * number].worker
        assert b[number].ttft_s < 0.6 * control[number].ttft_s
        assert b[number].usage != control[number].usage
    assert [one.worker for one in b] != [one.worker for one in control]
