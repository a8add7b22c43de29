"""From what a cursor delivers to what a reader is told: decoded, and cut where positions are missing."""

from collections.abc import Iterator
from itertools import pairwise

from headwater.events.jetstream.cursor import Raw
from headwater.events.log import Gap, Record, Slice, Unreadable
from headwater.schemas.pool import UnreadableBatch, decode_batch

PURGED = "purged"


def slices(raw: list[Raw], after: int) -> Iterator[Slice]:
    """Slices of the messages behind position `after`; each begins with the gap in front of it, if there is one.

    Messages are deleted one by one, by retention and by hand, so a hole may be anywhere. What is not behind
    `after` was declared gone while it was on its way, and stays gone.
    """
    raw = [message for message in raw if message.position > after]
    if not raw:
        return
    cuts = [at for at, (early, late) in enumerate(pairwise(raw), 1) if late.position > early.position + 1]
    for start, end in pairwise([0, *cuts, len(raw)]):
        run = raw[start:end]
        first = run[0].position
        gap = Gap(after + 1, first - 1, PURGED) if first > after + 1 else None
        after = run[-1].position
        yield _decoded(run, gap)


def _decoded(run: list[Raw], gap: Gap | None) -> Slice:
    records: list[Record] = []
    unreadable: list[Unreadable] = []
    for message in run:
        try:
            batch = decode_batch(message.data)
        except UnreadableBatch as error:
            unreadable.append(Unreadable(message.position, message.subject, str(error)))
            continue
        records.append(Record(message.position, message.subject, message.stored_ns, batch))
    return Slice(records, run[-1].pending, gap, tuple(unreadable))
