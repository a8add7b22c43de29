"""`headwater tune`: a search for routing weights."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.commands.analyse.whatif import Values
from headwater.ops.config.command import Options, command, group
from headwater.ops.config.processes import PoolReader
from headwater.ops.whatif.options import Runs, Search


@command
def trace(
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
    from headwater.ops.whatif import tune_command

    return tune_command.tune_trace(file, values, search, runs)


@command
def log(
    settings: PoolReader,
    *,
    values: Values,
    search: Annotated[Search, Options()],
    runs: Annotated[Runs, Options()],
) -> int:
    """Search for routing weights on a pool's recorded log."""
    from headwater.ops.process import signals
    from headwater.ops.whatif import tune_command

    return signals.run_command(
        lambda: tune_command.tune_log(settings.nats, settings.pool, values, search, runs)
    )


tune = group("tune", trace, log=log)
