"""`headwater advise`: a layout of workers for a model, GPUs and a trace or a recorded log."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.advise.options import Advice
from headwater.ops.config.command import Options, command, group
from headwater.ops.config.processes import PoolReader


@command
def trace(
    file: Annotated[str, Meta(description="trace in Mooncake's format, .jsonl or .jsonl.gz")],
    /,
    *,
    options: Annotated[Advice, Options()],
) -> int:
    """Recommend a layout of workers for a model, GPUs and a trace, by simulation, and say how sure that is.

    Layouts are those of tensor parallelism and of aggregated, or prefill and decode workers, which fit into the GPUs' memory.
    `headwater advise log` takes a recorded log instead of a trace, and the step times of its workers.
    """
    from headwater.ops.advise import command as advise

    return advise.advise_on_trace(file, options)


@command
def log(settings: PoolReader, *, options: Annotated[Advice, Options()]) -> int:
    """Recommend a layout of workers for the requests of a pool's recorded log, with the step times of its workers."""
    from headwater.ops.advise import command as advise
    from headwater.ops.process import signals

    return signals.run_command(lambda: advise.advise_on_log(settings.nats, settings.pool, options))


advise = group("advise", trace, log=log)
