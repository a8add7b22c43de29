"""Decisions that come with requests: followed if they are a picker's, fresh and for this prompt, once."""

import msgspec
import numpy as np
import pytest

from headwater.actors.edge.saga.driver import ChoiceMessages
from headwater.actors.edge.saga.http_call import DECISION_AGE_S_MAX, NO_HINTS, DecisionSeal, Picked
from headwater.actors.edge.saga.placement import Dispatcher
from headwater.actors.edge.saga.types import ChoiceSpec
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.events.memory import MemoryTable
from headwater.schemas import hashing
from headwater.schemas.hashing import U32
from headwater.schemas.inference import Sampling
from headwater.schemas.routing import NO_CONSTRAINTS, NO_PREFERENCES, Candidate, Decision, Weights
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.memory import memory_world

PROMPT: U32 = np.arange(40, dtype=np.uint32)
HASHES = hashing.sequence_hashes(PROMPT, 16, parent=hashing.seed())


def decided(wall_ns: int, request: str = "chatcmpl-x-0-2", last: int = int(HASHES[-1])) -> Decision:
    """The decision for `PROMPT`."""
    made = (1, 0, 0, wall_ns, request, 40, 6, 2, 0, 0, last, NO_CONSTRAINTS, NO_PREFERENCES, Weights(), 0)
    return Decision(*made, "w", 7, (Candidate("w", 7, 0, 0, 0, 0, 0, 0.0),), assumed=b"x" * 800)


async def sealed(clock: ManualClock, table: MemoryTable) -> bytes:
    """A header of a picker."""
    seal = DecisionSeal(table, clock)
    await seal.load()
    return seal.seal(Picked("x", "p", decided(clock.wall_ns())))


async def test_an_edge_reads_what_a_picker_wrote_once(clock: ManualClock) -> None:
    """With all that the saga and the headers of the response need, and without what only a recomputation does."""
    table = MemoryTable(clock)
    header = await sealed(clock, table)
    assert len(header) < 700
    edge = DecisionSeal(table, clock)
    picked = await edge.open([(b"accept", b"*/*"), (b"x-headwater-decision", header)])
    assert picked is not None
    assert (picked.id, picked.pool, picked.attempt) == ("x", "p", 2)
    assert (picked.decision.worker, picked.decision.epoch) == ("w", 7)
    assert picked.decision.chosen.worker == "w"
    assert await edge.open([(b"x-headwater-decision", header)]) is None
    assert await edge.open([]) is None


@pytest.mark.parametrize("change", ["forged", "another key", "cut", "no base64", "old", "second attempt"])
async def test_what_is_not_followed(change: str, clock: ManualClock) -> None:
    """A client must not choose its worker; a gateway's second attempt may find the first one at another edge."""
    table = MemoryTable(clock)
    header = await sealed(clock, table)
    more = [(b"x-envoy-attempt-count", b"1")]
    match change:
        case "forged":
            header = header[:-8] + b"AAAAAAAA"
        case "another key":
            table = MemoryTable(clock)
        case "cut":
            header = header[:20]
        case "no base64":
            header = b"\xff" * 40
        case "old":
            await clock.advance(DECISION_AGE_S_MAX + 1)
        case "second attempt":
            more = [(b"x-envoy-attempt-count", b"2")]
    assert await DecisionSeal(table, clock).open([(b"x-headwater-decision", header), *more]) is None


@pytest.mark.parametrize(
    ("picked", "fits"),
    [
        (Picked("x", "p", decided(0)), True),
        (Picked("x", "other", decided(0)), False),
        (Picked("x", "p", decided(0, last=1)), False),
        (Picked("x", "p", decided(0, request="msg_x-0-2")), False),
        (Picked("x", "p", msgspec.structs.replace(decided(0), prompt_tokens=41)), False),
    ],
    ids=["the same", "another pool", "another prompt", "another request", "another length"],
)
def test_a_decision_is_followed_for_its_prompt_only(picked: Picked, fits: bool, clock: ManualClock) -> None:
    """The hash of the last block covers the whole prompt and the salt."""
    workers = WorkerRegistry(memory_world(clock), "e", lambda *_: pytest.fail("nothing is spawned"))
    dispatcher = Dispatcher(workers, "p", NO_HINTS)
    spec = ChoiceSpec("chatcmpl-x", 0, Sampling(6))
    assert ChoiceMessages(spec, PROMPT, 16, dispatcher).fits(picked) is fits
    salted = msgspec.structs.replace(spec, cache_salt="tenant")
    assert not ChoiceMessages(salted, PROMPT, 16, dispatcher).fits(picked)
