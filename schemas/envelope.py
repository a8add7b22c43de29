"""What every appended message starts with: who wrote it, in which life, and in which order."""

from typing import Generic, TypeVar

import msgspec

EventT = TypeVar("EventT")

SCHEMA_VERSION = 1
"""Version of the event schemas written by this release."""


class Batch(msgspec.Struct, Generic[EventT], frozen=True, array_like=True):
    """One log message: the events of one writer, in the order they happened.

    `epoch` is the revision of the writer's lease, so a higher epoch is a later life; `seq` counts that
    life's batches on this subject from 1 and names the batch for retries; `wall_ns` is data and never
    decides anything in a fold.
    """

    version: int
    writer: str
    epoch: int
    seq: int
    wall_ns: int
    events: tuple[EventT, ...]


class Event(msgspec.Struct, frozen=True, array_like=True):
    """Base of every event. Concrete events set a tag, which is for ever."""
