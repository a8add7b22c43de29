"""The base of every event."""

import msgspec


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One fact of the log. Concrete events set a tag, which no later version reuses for anything else."""
