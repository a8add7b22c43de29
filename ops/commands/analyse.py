"""`headwater compare` and `headwater sim`: two engines side by side, and a fleet under faults."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.processes import ClientSettings
from headwater.ops.config.setting import ConfigError, Flag

NOTES = """\
Both engines get each prompt once, one request at a time, by the header x-headwater-engine. The edge must allow it: start it with
--client-policies …,direct. With authentication, the API key needs the scope worker."""


@command(defaults={"log.level": "warning"}, notes=NOTES)
def compare(
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
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON")] = False,
    settings: ClientSettings,
) -> int:
    """Send the same prompts to two engines at temperature 0, and show where and by how much their answers diverge."""
    from headwater.ops.compare import CompareOptions, run_compare
    from headwater.ops.process import signals

    names = tuple(name.strip() for name in engines.split(",") if name.strip())
    options = CompareOptions(model, url, api_key_file, prompts, names, limit, max_tokens, as_json)
    return signals.run_command(lambda: run_compare(settings.nats, options))


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
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON")] = False,
) -> int:
    """Run a simulated fleet under faults from a seed, on virtual time."""
    from headwater.ops.process.actor import compile_kernels
    from headwater.ops.sim import run as simulation

    if (seed is None) == (not seeds):
        raise ConfigError("sim: give either --seed N or --seeds FROM:TO")
    compile_kernels()
    if seed is None:
        return simulation.run_many(seeds, as_json=as_json, jobs=jobs)
    return simulation.run_one(seed, trace=trace, only=only or "", as_json=as_json)
