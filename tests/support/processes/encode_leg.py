"""kill -9 of a process of a real fleet while an image is on its way to the worker that serves the request.

A state is held by SIGSTOP of what would end it, and reached when the message that begins it passes the NATS server. So a kill lands in its state.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import product
from typing import Any, Final, Literal, NamedTuple, TypeVar

import httpx
import msgspec
import nats
import pytest
from nats.aio.msg import Msg

from headwater.actors.runtime.tables import LeaseTable
from headwater.actors.worker.encoding import OFFER_S
from headwater.engines.transfer.slab import CLAIM_S, QUARANTINE_S
from headwater.events.jetstream.buckets import JetStreamTable
from headwater.schemas import subjects
from headwater.schemas.inference import GenerateRequest, TokenFrame
from headwater.schemas.media import OfferClaim, OfferReleased
from headwater.schemas.subjects import ANY
from tests.support.processes.fleet import FleetProcess, descendants
from tests.support.processes.stopped import StoppedProcesses

T = TypeVar("T")

State = Literal["asked", "encoding", "dispatched", "claimed", "decode"]
"""The encode worker has not seen the image; its engine computes (an engine in processes of its own); the serving worker has not claimed the
embedding; it waits for the answer to its claim; the client has tokens."""

STATES: Final[tuple[State, ...]] = State.__args__  # type: ignore[attr-defined]
ENCODER: Final = "encode-0"
EDGE: Final = " edge "
WORKERS: Final = (ENCODER, "prefill-0", "decode-0")
ALL_VICTIMS: Final = (*WORKERS, " router ", EDGE)
SHORT, LONG = 8, 300
"""Tokens of an answer, and of one that takes some seconds."""

RESTARTED_S_MAX: Final = 180.0
"""A worker that is killed often is started again less often."""

PINNED_S_MAX: Final = OFFER_S + CLAIM_S + QUARANTINE_S
NAMESPACE: Final = "default"
WITHIN_S: Final = 60.0

Sign = Callable[[str, bytes], bool]
"""Is a message, by its subject and its data, the one that is awaited?"""

Holds = Callable[[list[dict[str, Any]]], bool]
"""Of the statistics of the actors that answered."""

_offer: msgspec.msgpack.Decoder[OfferClaim | OfferReleased] = msgspec.msgpack.Decoder(
    OfferClaim | OfferReleased
)


class PassingMessages:
    """The messages between the edges, the routers and the workers of a fleet since it was made, in order."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[Msg] = asyncio.Queue()

    async def note(self, message: Msg) -> None:
        """A message passed."""
        self._arrived.put_nowait(message)

    async def until(self, sign: Sign) -> None:
        """Wait for such a message; what passed before it is dropped."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                message = await self._arrived.get()
                if sign(message.subject, message.data):
                    return


@asynccontextmanager
async def passing_messages(up: FleetProcess) -> AsyncIterator[PassingMessages]:
    """Follow the messages of a fleet."""
    seen = PassingMessages()
    client = await nats.connect(up.nats)
    try:
        followed = (
            subjects.engine_requests(NAMESPACE, ANY),
            subjects.edge_frames(NAMESPACE, ANY),
            subjects.route_query(NAMESPACE, ANY),
        )
        for subject in followed:
            await client.subscribe(subject, cb=seen.note)
        await client.flush()
        yield seen
    finally:
        await client.close()


def is_for(what: str, verb: str = "generate") -> Sign:
    """A request for a worker, or with `router` a query for that."""
    if what == "router":
        return lambda subject, _: ".route." in subject
    return lambda subject, _: subject.endswith(f".{verb}") and f".{what}." in subject


def asks(worker: str) -> Sign:
    """An image for this encode worker."""
    return is_for(worker, "encode")


def serves(worker: str) -> Sign:
    """A request for this worker whose images have embeddings on offer."""
    is_request = is_for(worker)

    def sign(subject: str, data: bytes) -> bool:
        if not is_request(subject, data):
            return False
        media = msgspec.msgpack.decode(data, type=GenerateRequest).media
        return bool(media) and all(item.embedding is not None for item in media)

    return sign


def claims(worker: str) -> Sign:
    """A claim on what this encode worker offers."""
    is_offer = is_for(worker, "offer")
    return lambda subject, data: is_offer(subject, data) and isinstance(_offer.decode(data), OfferClaim)


def has_tokens(subject: str, data: bytes) -> bool:
    """Tokens for an edge that are not the end of an answer."""
    if not subject.endswith(".frames"):
        return False
    entries = msgspec.msgpack.decode(data, type=TokenFrame).entries
    return any(entry.tokens and not entry.finish for entry in entries)


async def killed_in_state(
    up: FleetProcess, state: State, victim: str, serving: str, ask: Coroutine[Any, Any, T]
) -> T:
    """The result of `ask`, a request with one image that no worker has, during which the victim is killed in that state.

    `victim` is the name of a worker, or a part of another process's command line. `serving` is the worker that gets the image.
    """
    encoder, server = await up.worker_pid(ENCODER), await up.worker_pid(serving)
    workers = {ENCODER: encoder, serving: server}
    if victim not in workers and victim.endswith("-0"):
        workers[victim] = await up.worker_pid(victim)
    stopped = StoppedProcesses()
    async with passing_messages(up) as messages:
        asked = asyncio.ensure_future(ask)
        try:
            if state == "asked":
                stopped.stop(encoder)
                await messages.until(asks(ENCODER))
            elif state == "encoding":
                stopped.stop(*descendants(encoder))
                await up.until("it encodes", _encodes)
            elif state in ("dispatched", "claimed"):
                stopped.stop(server)
                await messages.until(serves(serving))
                if state == "claimed":
                    stopped.stop(encoder)
                    stopped.resume(server)
                    await messages.until(claims(ENCODER))
            else:
                await messages.until(has_tokens)
            assert not asked.done(), f"it ended before it could be hurt: {asked}"
            if victim in workers:
                os.kill(workers[victim], signal.SIGKILL)
            else:
                up.kill(victim)
        finally:
            stopped.resume()
            if not asked.done() and asyncio.current_task().cancelling():  # type: ignore[union-attr]
                asked.cancel()
        async with asyncio.timeout(RESTARTED_S_MAX):
            return await asked


async def killed_with_a_request(up: FleetProcess, victim: str) -> None:
    """Kill a worker, or the `router`, that has received a message of a request and not looked at it. Some client must send requests."""
    pid = up.pids(f" {victim} ")[0] if victim == "router" else await up.worker_pid(victim)
    stopped = StoppedProcesses()
    async with passing_messages(up) as messages:
        stopped.stop(pid)
        try:
            await messages.until(is_for(victim, "encode" if victim == ENCODER else "generate"))
            os.kill(pid, signal.SIGKILL)
        except TimeoutError as error:
            raise AssertionError(f"{victim} got no request: {await up.stats()}") from error
        finally:
            stopped.resume()


class Kill(NamedTuple):
    """One row of the table: a state, who is killed in it, and the number of its own image."""

    state: State
    victim: str
    number: int

    def __str__(self) -> str:
        """As a part of a test's id."""
        return f"{self.state}-{self.victim.strip()}"


def kills(*states: State) -> list[Kill]:
    """Each party of a fleet that encodes, prefills and decodes apart, in each of these states."""
    rows = enumerate(product(states, ALL_VICTIMS))
    return [Kill(state, victim, number) for number, (state, victim) in rows]


async def check_kill(
    up: FleetProcess,
    kill: Kill,
    ask: Callable[[int, int], Coroutine[Any, Any, str]],
    expected: Callable[[int, int], Coroutine[Any, Any, str]],
) -> None:
    """Kill one process: the answer is right, or for the edge's client the connection breaks; no other process ends, and nothing stays pinned.

    `ask` and `expected` are called with the number of an image and the length of the answer.
    """
    await up.until_whole(len(WORKERS), RESTARTED_S_MAX)
    before = await _incarnations(up)
    length = LONG if kill.state == "decode" else SHORT
    asked = killed_in_state(up, kill.state, kill.victim, "prefill-0", ask(kill.number, length))
    if kill.victim == EDGE:
        with pytest.raises(httpx.TransportError):
            await asked
    else:
        got = await asked
        await up.until_whole(len(WORKERS), RESTARTED_S_MAX)
        assert got == await expected(kill.number, length)
    await up.until_whole(len(WORKERS), RESTARTED_S_MAX)
    await up.until("nothing is pinned", has_nothing_left(len(WORKERS)), within_s=PINNED_S_MAX + WITHIN_S)
    after = await _incarnations(up)
    [replaced] = {actor for actor, _ in before.items() ^ after.items()}
    assert kill.victim.strip() in replaced


async def _incarnations(up: FleetProcess) -> dict[tuple[str, str], str]:
    """Which incarnation of each actor has its lease, by kind and name."""
    client = await nats.connect(up.nats)
    try:
        # Not nats-py's `keys`, which on a busy machine may find none.
        leases = await LeaseTable(JetStreamTable(client, subjects.lease_bucket(NAMESPACE))).read_all()
    finally:
        await client.close()
    return {(one.kind, one.name): one.incarnation for one in leases}


def is_idle(workers: int) -> Holds:
    """So many workers answer, and none has a request."""
    return _have_none(workers, "running", "waiting")


def has_nothing_left(workers: int) -> Holds:
    """So many workers answer, and none has a request, or holds KV or an embedding for another one."""
    return _have_none(workers, "running", "waiting", "handoffs_held", "embedding_bytes_held")


def _have_none(workers: int, *names: str) -> Holds:
    def holds(stats: list[dict[str, Any]]) -> bool:
        found = [one for one in stats if one["name"] == "headwater-worker"]
        # One that is too busy to answer in time may have anything.
        return len(found) >= workers and not any(one.get(name) for one in found for name in names)

    return holds


def _encodes(stats: list[dict[str, Any]]) -> bool:
    return any(one["id"] == ENCODER and one.get("running") for one in stats)


def epochs(stats: list[dict[str, Any]]) -> dict[str, int]:
    """The incarnations of the workers, by name."""
    return {
        one["id"]: one["epoch"] for one in stats if one["name"] == "headwater-worker" and one.get("epoch")
    }
