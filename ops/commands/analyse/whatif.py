"""`headwater whatif`: a trace or a recorded log with other settings."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from headwater.ops.config.command import Columns, Options, command, group
from headwater.ops.config.processes import PoolReader
from headwater.ops.whatif.options import Runs
from headwater.ops.whatif.setup import Setup

Values = Annotated[Mapping[str, tuple[Any, ...]], Columns(Setup)]


@command
def trace(
    file: Annotated[str, Meta(description="trace in Mooncake's format, .jsonl or .jsonl.gz")],
    /,
    *,
    values: Values,
    runs: Annotated[Runs, Options()],
) -> int:
    """Simulate a trace with a router and engines on virtual time, in columns with different settings.

    An option given several times defines columns; an option given once holds for all of them. `headwater whatif log`
    takes a recorded log instead of a trace.
    """
    from headwater.ops.whatif import command as whatif

    return whatif.run_trace(file, values, runs)


@command
def log(settings: PoolReader, *, values: Values, runs: Annotated[Runs, Options()]) -> int:
    """Simulate a pool's recorded log: with its own settings, compared with what happened, and with other ones."""
    from headwater.ops.process import signals
    from headwater.ops.whatif import command as whatif

    return signals.run_command(lambda: whatif.run_log(settings.nats, settings.pool, values, runs))


whatif = group("whatif", trace, log=log)
