"""What is computed from columns does not depend on what was asked before: rows change, and old ones are dropped."""

from itertools import islice

import pytest

from headwater.events.ports import Record
from headwater.ops.history import series
from headwater.ops.history.requests import RequestTable
from headwater.schemas.encoding import decode_batch
from headwater.schemas.routing import Decision
from tests.bench.large_log import BLOCK, MadeUpFleet
from tests.support.worlds.clock import ManualClock

STEP_NS = 10_000_000


def shown(table: RequestTable, now_ns: int) -> object:
    """All that is computed from columns, of the time before a moment."""
    window = series.Window(now_ns - 1_000 * STEP_NS, now_ns, 7)
    rows = series.selection(table, window.from_ns, window.to_ns)
    return (
        series.rates(table, window.from_ns, window.to_ns),
        series.hits_by_worker(table, window.from_ns, window.to_ns),
        series.request_series(rows, window),
        series.usage_by(rows, "tenant", []),
    )


@pytest.mark.parametrize("late", [0, 40])
def test_columns_are_those_of_their_rows_whenever_they_are_asked_for(late: int) -> None:
    """With `late`, decisions are read so many messages after they were made: some after the first token, some after the end."""
    asked, fresh = RequestTable(rows_max=150), RequestTable(rows_max=150)
    fleet = MadeUpFleet("ns", ManualClock(), workers=3)
    waiting: list[tuple[int, Decision]] = []
    for number, message in enumerate(islice(fleet.messages(), 4_000)):
        batch = decode_batch(message.sealed.data)
        waiting += [(number, event) for event in batch.events if isinstance(event, Decision)]
        record = Record(number + 1, message.subject, (number + 1) * STEP_NS, batch)
        due = [event for made, event in waiting if made + late <= number]
        waiting = [one for one in waiting if one[0] + late > number]
        for table in (asked, fresh):
            if ".req." in message.subject:
                table.fold(record)
            for event in due:
                table.decide(event, number + 1, BLOCK)
        if number % 37 == 0:
            shown(asked, record.stored_ns)
    assert len(asked.rows) <= 150 < len(fleet.requests)
    for back in (0, 100, 700):
        now_ns = (4_000 - back) * STEP_NS
        assert shown(asked, now_ns) == shown(fresh, now_ns)
    assert [row["found_tokens"] for row in asked.started.lines()] == [
        row.found_tokens for row in asked.started.rows
    ]


def test_requests_of_other_pools_are_not_shown() -> None:
    """The request log has those of all pools: what was routed without a decision of this pool went elsewhere."""
    here, elsewhere = RequestTable(), RequestTable()
    fleet = MadeUpFleet("ns", ManualClock(), workers=3)
    for number, message in enumerate(islice(fleet.messages(), 2_000)):
        batch = decode_batch(message.sealed.data)
        record = Record(number + 1, message.subject, (number + 1) * STEP_NS, batch)
        for table in (here, elsewhere):
            if ".req." in message.subject:
                table.fold(record)
        for event in batch.events:
            if isinstance(event, Decision):
                here.decide(event, number + 1, BLOCK)
    now_ns = 2_000 * STEP_NS
    assert len(here.accepted_between(0, now_ns)) == len(here.rows) == len(fleet.requests)
    assert here.open_at(now_ns)
    # The newest may not be routed yet.
    assert len([*elsewhere.accepted_between(0, now_ns), *elsewhere.open_at(now_ns)]) <= 2
    assert [len(lines) for lines in series.selection(elsewhere, 0, now_ns)][1:] == [0, 0]
