"""`headwater whatif` and `headwater tune`: a trace or a recorded log with other settings, and a search for routing weights."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from headwater.ops.config.command import Columns, Options, command, group
from headwater.ops.config.processes import PoolReader
from headwater.ops.whatif.options import Runs, Search
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


@command
def tune_trace(
    file: Annotated[str, Meta(description="trace in Mooncake's format, .jsonl or .jsonl.gz")],
    /,
    *,
    values: Values,
    search: Annotated[Search, Options()],
    runs: Annotated[Runs, Options()],
) -> int:
    """Search for routing weights on a trace, and show what they gain on requests that the search has not seen.

    `headwater tune log` takes a recorded log instead of a trace.
    """
    from headwater.ops.whatif import command as whatif_command

    return whatif_command.tune_trace(file, values, search, runs)


@command
def tune_log(
    settings: PoolReader,
    *,
    values: Values,
    search: Annotated[Search, Options()],
    runs: Annotated[Runs, Options()],
) -> int:
    """Search for routing weights on a pool's recorded log."""
    from headwater.ops.process import signals
    from headwater.ops.whatif import command as whatif_command

    return signals.run_command(
        lambda: whatif_command.tune_log(settings.nats, settings.pool, values, search, runs)
    )


tune = group("tune", tune_trace, log=tune_log)
