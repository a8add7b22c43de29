"""Following the chains of a log: is each message the one that came behind the message before it?

Every message is checked against its own digest when it is decoded. What is left to notice is a message that is
missing between two sound ones, one that was put in another's place, and one that is there twice. Pure: part of the
fold, so that every replica and every replay finds the same breaks at the same positions.
"""

from typing import NamedTuple

import msgspec

from headwater.events.log import Record
from headwater.schemas.envelope import NO_DIGEST


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The newest message of a subject that was read."""

    position: int
    writer: str
    epoch: int
    seq: int
    digest: bytes


class Break(NamedTuple):
    """At `position` the chain of `subject` does not go on where it stood; `writer`'s events are incomplete."""

    position: int
    subject: str
    writer: str
    reason: str


class Chains:
    """The heads of all subjects. `whole`: the log was read from its first message on, so no head is unknown."""

    def __init__(self, heads: dict[str, Head] | None = None, *, whole: bool = True) -> None:
        self.heads = heads or {}
        self.whole = whole

    def follow(self, record: Record) -> tuple[bool, Break | None]:
        """(is it to be folded?, what is wrong with its place). Repeated messages are not to be folded twice.

        After a break the chain goes on from this message, so each break is told once.
        """
        batch = record.batch
        if batch.digest == NO_DIGEST:
            # Schema version 1 wrote no chain.
            return True, None
        head = self.heads.get(record.subject)
        reason = ""
        if head is None:
            if batch.previous != NO_DIGEST and self.whole:
                reason = "the messages before it are missing"
        elif (batch.writer, batch.epoch) == (head.writer, head.epoch):
            if batch.seq <= head.seq:
                return False, None
            if batch.seq > head.seq + 1:
                lost = batch.seq - head.seq - 1
                reason = f"{lost} messages between position {head.position} and this one are missing"
            elif batch.previous != head.digest:
                reason = f"the message at position {head.position} is not the one it was written behind"
        elif batch.epoch < head.epoch:
            return False, Break(
                record.position,
                record.subject,
                batch.writer,
                f"epoch {batch.epoch} wrote although {head.epoch} had begun",
            )
        elif batch.seq != 1 or batch.previous != head.digest:
            reason = f"messages between position {head.position} and this one are missing"
        self.heads[record.subject] = Head(record.position, batch.writer, batch.epoch, batch.seq, batch.digest)
        broken = Break(record.position, record.subject, batch.writer, reason) if reason else None
        return True, broken
