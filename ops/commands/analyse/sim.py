"""`headwater sim`: a simulated fleet under faults."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.setting import Flag


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
    from headwater.ops.process.kernels import compile_kernels
    from headwater.ops.sim import command as simulation

    if (seed is None) == (not seeds):
        raise ConfigError("sim: give either --seed N or --seeds FROM:TO")
    compile_kernels()
    if seed is None:
        return simulation.run_many(seeds, as_json=as_json, jobs=jobs)
    return simulation.run_one(seed, trace=trace, only=only or "", as_json=as_json)
