"""The facts of the logs, one module per kind, and their base."""

import msgspec


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One fact of the log. Concrete events set a tag, which no later version reuses for anything else."""
