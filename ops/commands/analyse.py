"""Commands that simulate and compare: `whatif`, `tune`, `advise`, `compare` and `sim`."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from headwater.ops.config.command import Columns, Json, Options, command, group
from headwater.ops.config.processes import ClientSettings, PoolReader
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.advise_options import Advice
from headwater.ops.whatif.setup import Runs, Search, Setup

Values = Annotated[Mapping[str, tuple[Any, ...]], Columns(Setup)]


@command
def whatif_trace(
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
    from headwater.ops.whatif import command as whatif_command

    return whatif_command.run_trace(file, values, runs)


@command
async def whatif_log(settings: PoolReader, *, values: Values, runs: Annotated[Runs, Options()]) -> int:
    """Simulate a pool's recorded log: with its own settings, compared with what happened, and with other ones."""
    from headwater.ops.whatif import command as whatif_command

    return await whatif_command.run_log(settings.nats, settings.pool, values, runs)


whatif = group("whatif", whatif_trace, log=whatif_log)


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
async def tune_log(
    settings: PoolReader,
    *,
    values: Values,
    search: Annotated[Search, Options()],
    runs: Annotated[Runs, Options()],
) -> int:
    """Search for routing weights on a pool's recorded log."""
    from headwater.ops.whatif import command as whatif_command

    return await whatif_command.tune_log(settings.nats, settings.pool, values, search, runs)


tune = group("tune", tune_trace, log=tune_log)


@command
def advise_trace(
    file: Annotated[str, Meta(description="trace in Mooncake's format, .jsonl or .jsonl.gz")],
    /,
    *,
    options: Annotated[Advice, Options()],
) -> int:
    """Recommend a layout of workers for a model, GPUs and a trace, by simulation, and say how sure that is.

    Layouts are those of tensor parallelism and of aggregated, or prefill and decode workers, which fit into the GPUs' memory.
    `headwater advise log` takes a recorded log instead of a trace, and the step times of its workers.
    """
    from headwater.ops.whatif import advise

    return advise.advise_on_trace(file, options)


@command
async def advise_log(settings: PoolReader, *, options: Annotated[Advice, Options()]) -> int:
    """Recommend a layout of workers for the requests of a pool's recorded log, with the step times of its workers."""
    from headwater.ops.whatif import advise

    return await advise.advise_on_log(settings.nats, settings.pool, options)


advise = group("advise", advise_trace, log=advise_log)


NOTES = """\
Both engines get each prompt once, one request at a time, by the header x-headwater-engine. The edge must allow it: start it with
--client-policies …,direct. With authentication, the API key needs the scope worker."""


@command(defaults={"log.level": "warning"}, notes=NOTES)
async def compare(
    model: Annotated[str, Meta(description="model, or the pool that serves it")],
    /,
    *,
    prompts: Annotated[
        str,
        Meta(
            description="JSONL file: strings, or requests with `prompt` or `messages` (default: the newest prompts that the "
            "request log has recorded)"
        ),
    ] = "",
    limit: Annotated[int, Meta(ge=1, description="prompts to send at most")] = 20,
    engines: Annotated[
        str, Meta(description="the two engines, separated by a comma (default: those with a ready worker)")
    ] = "",
    max_tokens: Annotated[int, Meta(ge=1, description="tokens of an answer at most")] = 64,
    url: Annotated[str, Meta(description="URL of an edge")] = "http://127.0.0.1:8000",
    api_key_file: Annotated[str, Meta(description="file with the API key for the edge")] = "",
    as_json: Json = False,
    settings: ClientSettings,
) -> int:
    """Send the same prompts to two engines at temperature 0, and show where and by how much their answers diverge."""
    from headwater.ops.operator.compare import CompareOptions, run_compare

    names = tuple(name.strip() for name in engines.split(",") if name.strip())
    options = CompareOptions(model, url, api_key_file, prompts, names, limit, max_tokens, as_json)
    return await run_compare(settings.nats, options)


@command
def sim(
    *,
    seed: Annotated[int | None, Meta(description="run this seed")] = None,
    seeds: Annotated[
        str, Meta(description="FROM:TO, run many seeds on all cores; exit code 1 if any fails")
    ] = "",
    trace: Annotated[bool, Meta(description="print every event")] = False,
    only: Annotated[
        str | None, Meta(description="numbers of the seed's faults to inject, comma-separated, or none")
    ] = None,
    jobs: Annotated[int, Meta(ge=0, description="processes for --seeds; 0: one per core")] = 0,
    as_json: Json = False,
) -> int:
    """Run a simulated fleet under faults from a seed, on virtual time."""
    from headwater.ops.sim import run as simulation
    from headwater.ops.start.actor import compile_kernels

    if (seed is None) == (not seeds):
        raise ConfigError("sim: give either --seed N or --seeds FROM:TO")
    compile_kernels()
    if seed is None:
        return simulation.run_many(seeds, as_json=as_json, jobs=jobs)
    return simulation.run_one(seed, trace=trace, only=only or "", as_json=as_json)
