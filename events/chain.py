"""Verification of a log's hash chains: each message must follow the one that it names as its predecessor.

Each message's own digest is checked when it is decoded. This module detects the remaining faults: a message missing
between two valid ones, one replaced by another, and a duplicate. Pure, and part of the fold, so every router and every
replay finds the same breaks at the same positions.
"""

from typing import NamedTuple

import msgspec

from headwater.events.ports import Record
from headwater.schemas.encoding import NO_DIGEST


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The newest message read of a subject."""

    position: int
    writer: str
    epoch: int
    seq: int
    digest: bytes


class Break(NamedTuple):
    """A break in the chain of `subject` at `position`: `writer`'s events are incomplete."""

    position: int
    subject: str
    writer: str
    reason: str


class Chains:
    """The heads of all subjects. `whole`: the log was read from its first message, so no head is unknown."""

    def __init__(self, heads: dict[str, Head] | None = None, *, whole: bool = True) -> None:
        self.heads = heads or {}
        self.whole = whole

    def follow(self, record: Record) -> tuple[bool, Break | None]:
        """(whether to fold the record, the break before it if any). Duplicates are not folded again.

        After a break the chain continues from this message, so each break is reported once.
        """
        batch = record.batch
        if batch.digest == NO_DIGEST:
            # It was not sealed: it is folded without a log.
            return True, None
        head = self.heads.get(record.subject)
        reason = ""
        if head is None:
            if batch.previous != NO_DIGEST and self.whole:
                reason = "the messages before it are missing"
        elif (batch.writer, batch.epoch) == (head.writer, head.epoch):
            if batch.seq == head.seq and batch.digest != head.digest:
                reason = f"it has the number of the message at position {head.position}, and is another one"
                return False, Break(record.position, record.subject, batch.writer, reason)
            if batch.seq <= head.seq:
                # Written again, because the first answer was lost.
                return False, None
            if batch.seq > head.seq + 1:
                lost = batch.seq - head.seq - 1
                reason = f"{lost} messages between position {head.position} and this one are missing"
            elif batch.previous != head.digest:
                reason = f"the message at position {head.position} is not the one it names as its predecessor"
        elif batch.epoch < head.epoch:
            return False, Break(
                record.position,
                record.subject,
                batch.writer,
                f"epoch {batch.epoch} wrote after epoch {head.epoch} had started",
            )
        elif batch.seq != 1 or batch.previous != head.digest:
            reason = f"messages between position {head.position} and this one are missing"
        self.heads[record.subject] = Head(record.position, batch.writer, batch.epoch, batch.seq, batch.digest)
        broken = Break(record.position, record.subject, batch.writer, reason) if reason else None
        return True, broken
