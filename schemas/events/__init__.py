"""The facts of the logs, one module per kind, and their base."""

import msgspec


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One fact of the log. Concrete events set a tag, which no later version reuses for anything else."""


class UnknownEvent(Event, frozen=True, tag="unknown"):
    """In place of an event that a later release wrote: this one does not have its `kind`. Never written; folds ignore it."""

    kind: str
