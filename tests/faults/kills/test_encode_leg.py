"""kill -9 of the encode worker, the serving worker, the router and the edge, in states of an image on its way between them.

`tests/sim/test_encode_leg_kills.py` has the whole table on virtual time; these are real processes, and a real NATS server.
"""

from collections.abc import AsyncIterator
from itertools import count, product
from typing import Any

import httpx
import pytest
import pytest_asyncio

from headwater.actors.worker.handoffs import CHECK_PERIOD_S, GONE_S
from tests.support.clients.sim_images import ANSWER_TOKENS, expected, question
from tests.support.processes.encode_leg import (
    EDGE,
    PINNED_S_MAX,
    State,
    epochs,
    has_nothing_left,
    is_idle,
    killed_in_state,
)
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(200)]

SERVING = "worker-0"
VICTIMS = ("encode-0", SERVING, " router ", EDGE)
SIM_STATES: tuple[State, ...] = ("asked", "dispatched", "claimed", "decode")
IN_EVERY_RUN: set[tuple[State, str]] = {("claimed", "encode-0"), ("decode", EDGE)}
LONG, ENDLESS = 300, 30_000
"""Tokens of an answer that takes two seconds, and of one that takes longer than anything here."""

LOADED_S = 20.0
"""What a busy machine may add to a time."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """A worker, and an encode worker that encodes all images. At the end neither has anything that it holds for another one."""
    flags = ("--engine", "sim", "--workers", "1", "--encode-workers", "1", "--encode-legs", "always")
    room = ("--max-model-len", "40000", "--sim-blocks", "4000")
    async with fleet(tmp_path_factory.mktemp("encode"), *flags, *room) as made:
        yield made
        await made.until("nothing is pinned", has_nothing_left(2), within_s=PINNED_S_MAX + LOADED_S)


numbers = count(100)


async def ask(up: FleetProcess, seed: int, length: int = ANSWER_TOKENS) -> str | httpx.TransportError:
    """The answer about a picture, or what became of the connection."""
    async with up.client() as client:
        try:
            reply = await client.post(
                "/v1/chat/completions", json=question(seed, before=f"{seed}", length=length)
            )
        except httpx.TransportError as error:
            return error
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def times_aborted(up: FleetProcess) -> int:
    """How often a worker has aborted requests of an edge that is gone."""
    return up.log.read_text().count('"orphans_aborted"')


def rows() -> list[Any]:
    """States and victims; the long form has all."""
    return [
        pytest.param(
            state,
            victim,
            id=f"{state}-{victim.strip()}",
            marks=[] if (state, victim) in IN_EVERY_RUN else pytest.mark.soak,
        )
        for state, victim in product(SIM_STATES, VICTIMS)
    ]


@pytest.mark.parametrize(("state", "victim"), rows())
async def test_a_kill_costs_no_answer_but_the_edges_own(up: FleetProcess, state: State, victim: str) -> None:
    """One right answer, or for the edge's client one broken connection; the others stay up, and an endless answer stops."""
    await up.until_whole()
    seed = next(numbers)
    before, aborted = epochs(await up.stats()), times_aborted(up)
    length = ANSWER_TOKENS if state != "decode" else ENDLESS if victim == EDGE else LONG
    found = await killed_in_state(up, state, victim, SERVING, ask(up, seed, length))
    if victim == EDGE:
        assert isinstance(found, httpx.TransportError)
        await up.until("no worker generates", is_idle(2), within_s=GONE_S + 3 * CHECK_PERIOD_S + LOADED_S)
        assert length != ENDLESS or times_aborted(up) > aborted
    else:
        assert found == expected(seed, length=length)
    await up.until_whole()
    if victim not in before:
        assert epochs(await up.stats()) == before
    seed = next(numbers)
    assert await ask(up, seed) == expected(seed)
