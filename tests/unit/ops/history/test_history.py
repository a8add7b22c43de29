"""The history of a pool against folds of its log: at every position it says what a replay says, and nothing of what came later."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from headwater.ops.history import decision as decisions
from headwater.ops.history.history import History, NotKept
from headwater.ops.history.request_spans import events_of, waterfall
from headwater.ops.history.requests import RequestTable, request_of
from headwater.ops.sim.fleet import POOL
from headwater.ops.sim.loop import VirtualLoop
from headwater.router.load import Loads
from headwater.router.state import RouterState
from headwater.router.worker import Credit
from headwater.schemas.routing import Decision
from tests.support.worlds.told import history_of, ports_of, records_of, told
from tests.support.worlds.virtual import virtual


def facts(loads: Loads) -> Any:
    """What the history has of loads: all but credit, which follows from them."""
    return msgspec.to_builtins(msgspec.structs.replace(loads, credit=Credit()))


async def shown_at(history: History, position: int) -> Any:
    """The loads that the history shows at a position."""
    return facts((await history.fleet_at(await history.moment(position))).loads)


@pytest.mark.parametrize("roles", [("both", "both", "both"), ("prefill", "prefill", "decode", "decode")])
@virtual
async def test_every_position_shows_what_a_replay_shows(
    clock: VirtualLoop, monkeypatch: pytest.MonkeyPatch, roles: Any
) -> None:
    """Forwards, backwards and in leaps, without KV events; with them the whole state is equal too."""
    monkeypatch.setattr("headwater.ops.history.history.RUNG_RECORDS", 20)
    async with told(clock, roles) as fleet:
        history, records = await history_of(fleet), await records_of(fleet)
        state, wanted, digests = RouterState(), {}, {}
        for record in records:
            state.apply(record)
            wanted[record.position] = facts(state.loads)
            digests[record.position] = state.digest()
        positions = list(wanted)
        leaps = positions[::7] + positions[::-5] + [positions[n * 37 % len(positions)] for n in range(40)]
        for position in leaps:
            assert await shown_at(history, position) == wanted[position], position
        for position in leaps[::4]:
            assert (await history.state_at(position)).digest() == digests[position]
        moment = await history.moment(None)
        assert moment.position == positions[-1]
        assert moment.stored_ns == records[-1].stored_ns


@virtual
async def test_positions_have_times_and_times_have_positions(clock: VirtualLoop) -> None:
    """Those at which the log's server stored the messages."""
    async with told(clock, bursts=2) as fleet:
        history, records = await history_of(fleet), await records_of(fleet)
        for record in records[::9]:
            assert (await history.moment(record.position)).stored_ns == record.stored_ns
            later = [one for one in records if one.stored_ns <= record.stored_ns]
            assert await history.position_at(record.stored_ns) == later[-1].position


@virtual
async def test_a_request_is_shown_as_it_was(clock: VirtualLoop) -> None:
    """It is open until its end, and its waterfall covers the time from its acceptance to its end without a hole."""
    async with told(clock) as fleet:
        history = await history_of(fleet)
        rows = history.requests.rows
        assert len(rows) == 48
        assert all(row.ended_ns and row.reason == "length" for row in rows)
        lost = [row for row in rows if row.failures]
        assert lost, "the killed worker had no request"
        for row in rows:
            for now_ns in (
                row.accepted_ns - 1,
                row.accepted_ns,
                row.started_ns,
                row.ended_ns - 1,
                row.ended_ns,
            ):
                is_open = row.accepted_ns <= now_ns < row.ended_ns
                assert row.is_open(now_ns) == is_open
                assert (row in history.requests.open_at(now_ns)) == is_open
            assert row.state_at(row.accepted_ns) == "routing"
            assert row.state_at(row.ended_ns) == "ended"
            shown = waterfall(await events_of(fleet.store.requests, row, row.ended_ns), [])
            spans = sorted(shown.spans, key=lambda span: span.start_ns)
            assert spans[0].start_ns == row.accepted_ns
            assert spans[-1].end_ns == row.ended_ns
            for early, late in pairwise(spans):
                assert early.end_ns == late.start_ns
            assert [mark.kind for mark in shown.marks][:: len(shown.marks) - 1] == ["accepted", "ended"]
        for row in lost:
            shown = waterfall(await events_of(fleet.store.requests, row, row.ended_ns), [])
            assert any(span.outcome for span in shown.spans)
            assert len({span.worker for span in shown.spans if span.worker}) == 2
            assert row.state_at(row.failures[0]) == "routing"
            assert [row.worker_at(at) for at in (row.failures[0], row.ended_ns)] == [
                name for _, name in row.workers
            ]


@pytest.mark.parametrize("roles", [("both", "both", "both"), ("prefill", "prefill", "decode", "decode")])
@virtual
async def test_any_decision_can_be_made_again(clock: VirtualLoop, roles: Any) -> None:
    """With its own policy it comes out as recorded, to the last bit, also where earlier ones were not stored yet; its terms sum to its costs."""
    async with told(clock, roles) as fleet:
        history = await history_of(fleet)
        made = [
            event
            for record in await records_of(fleet)
            for event in record.batch.events
            if isinstance(event, Decision)
        ]
        assert any(one.seen < one.number - 1 for one in made), (
            "no decision was made before another was stored"
        )
        for one in made[::3]:
            found = await decisions.find(history, one.request)
            assert found is not None
            assert found.decision == one
            again = await decisions.candidates_of(history, found)
            assert again.problem == ""
            assert again.decision is not None
            assert again.decision.digest == one.digest
            assert again.decision.worker == one.worker
            for candidate in one.candidates:
                terms = decisions.terms_of(candidate, one, 16)
                assert sum(term.value for term in terms) == pytest.approx(candidate.score, abs=1e-6)
        assert found is not None
        other = await decisions.what_if(history, found, "kv", {"memory": 1e6, "estimate": False})
        assert other.decision is not None
        assert other.decision.digest != one.digest


@pytest.mark.parametrize("roles", [("both", "both", "both"), ("prefill", "prefill", "decode", "decode")])
@virtual
async def test_which_log_is_read_first_makes_no_difference(clock: VirtualLoop, roles: Any) -> None:
    """What is known of a request, and what was expected of its first token, also where later decisions moved it to another worker."""
    async with told(clock, roles) as fleet:
        requests = [one async for piece in fleet.store.requests.scan(0, 1 << 62) for one in piece.records]
        both = sorted([*requests, *await records_of(fleet)], key=lambda one: one.stored_ns)
        tables = []
        for order in (both, [*requests, *(one for one in both if one not in requests)]):
            table = RequestTable()
            for record in order:
                if record.subject.split(".")[2] == "req":
                    table.fold(record)
                for event in record.batch.events:
                    if isinstance(event, Decision):
                        table.decide(event, record.position, 16)
            tables.append(table)
        assert tables[0].rows == tables[1].rows
        rows = [row for row in tables[0].rows if row.failures and row.failures[0] > row.started_ns]
        assert any(len(row.decisions) > len(row.attempts) for row in rows), (
            "no one moved after its first token"
        )
        assert all(row.expected_tokens >= 0 and not row.noted for row in tables[0].rows)


@virtual
async def test_what_is_not_kept_is_said(clock: VirtualLoop) -> None:
    """A log without its beginning, and without a snapshot that it continues."""
    async with told(clock, bursts=2) as fleet:
        log = fleet.store.pool(POOL)
        log.purge(30)
        for name in await fleet.store.blobs.names(""):
            await fleet.store.blobs.delete(name)
        ports = ports_of(fleet)
        history = History(ports, POOL, await ports.pool_log(POOL))
        await history.open()
        await history.follow()
        assert history.indexed_from == 29
        with pytest.raises(NotKept, match="position 12 is gone: the log and its snapshots begin at 29"):
            await history.moment(12)
        with pytest.raises(NotKept, match="what was cached at position 40 is not known"):
            await history.state_at(40)


@virtual
async def test_the_table_keeps_the_newest_requests(clock: VirtualLoop) -> None:
    """And says which it dropped."""
    async with told(clock, bursts=2) as fleet:
        table = RequestTable(rows_max=10)
        async for piece in fleet.store.requests.scan(0, 1 << 62):
            for record in piece.records:
                table.fold(record)
        assert len(table.rows) <= 10
        assert table.dropped_ns >= max(
            row.accepted_ns for row in (await history_of(fleet)).requests.rows if row.id not in table.by_id
        )
        assert set(table.by_id) == {row.id for row in table.rows}


@pytest.mark.parametrize(
    ("decision", "request_id"),
    [
        ("cmpl-ec41a8c6d5dc3f5a0c2f4f51-0-1", "cmpl-ec41a8c6d5dc3f5a0c2f4f51"),
        ("resp_abc-3-12", "resp_abc"),
        ("chatcmpl-12-0-1-e3-2", "chatcmpl-12"),
        ("video_x-2-0-1", "video_x-2"),
        ("odd", "odd"),
    ],
)
def test_a_decisions_name_has_its_request(decision: str, request_id: str) -> None:
    """Before the choice, the attempt, and perhaps an item of media."""
    assert request_of(decision) == request_id
