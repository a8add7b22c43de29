"""`headwater explain --all`: the candidates that a decision's record does not keep come from the log."""

from typing import Any

from headwater.events.memory import MemoryBlobs, MemoryLog
from headwater.events.ports import Entry
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.history.explanation import describe
from headwater.ops.operator.explain import decisions_for, is_summarized, with_all_candidates
from headwater.router.decide import DecisionContext, Evaluation, evaluate, prompt_of
from headwater.router.state import RouterState
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, seal
from headwater.schemas.events import Event
from headwater.schemas.routing import Weights
from headwater.schemas.subjects import PoolKind, pool_subject
from tests.support.data.examples import joined, record
from tests.support.data.queries import route_query
from tests.support.worlds.clock import WALL_NS, ManualClock

WORKERS = 20


async def test_every_candidate_is_shown() -> None:
    """Each with the cost that it had, on a state that includes the router's decision before."""
    log, state = MemoryLog(ManualClock()), RouterState()

    async def store(kind: PoolKind, writer: str, event: Event, seq: int = 1) -> None:
        batch: Batch[Any] = Batch(SCHEMA_VERSION, writer, 1, seq, WALL_NS, (event,))
        await log.append(Entry(pool_subject("ns", "p", kind, writer), seal(batch)))

    for number in range(WORKERS):
        await store("fleet", f"w{number}", joined(f"w{number}"))
        state.apply(record(number + 1, joined(f"w{number}"), writer=f"w{number}"))
    expected = []
    for sequence, request in enumerate(("a-0-1", "b-0-1"), 1):
        context = DecisionContext(sequence, WORKERS, 0, WALL_NS, Weights(), False)
        query = route_query(request, 100)
        made = evaluate(state.index, state.loads, state.cold, prompt_of(query), query, context)
        assert isinstance(made, Evaluation)
        expected.append(tuple(made.candidates))
        state.loads.decide(made.decision)
        await store("route", "r1", made.decision, sequence)
    found = await decisions_for(log, "b-0")
    assert [is_summarized(one.decision) for one in found] == [True]
    whole = await with_all_candidates(log, SnapshotStore(MemoryBlobs(), "p"), "b-0", found)
    assert [one.decision.candidates for one in whole] == [expected[1]]
    assert expected[1] != expected[0]
    text = describe(whole[0].decision, whole[0].position, whole[0].after)
    assert all(f"w{number} " in text for number in range(WORKERS))
    assert "--all" not in text
