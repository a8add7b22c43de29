"""`headwater bench`: measurements of this machine."""

from functools import partial
from typing import Annotated, Literal

from msgspec import Meta

from headwater.ops.bench.zoo.options import ZooOptions
from headwater.ops.config.command import Options, command
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.setting import Flag

What = Literal[
    "hash",
    "index",
    "edge",
    "limits",
    "route",
    "snapshot",
    "log",
    "media",
    "nixl",
    "whatif",
    "signal-age",
    "replicas",
    "parsers",
]


@command
def bench(
    what: Annotated[What, Meta(description="what to measure")],
    /,
    *,
    peer: Annotated[
        bool,
        Meta(
            description="index: measure a peer's index too, if it is installed; whatif --zoo: also replay with the peer, "
            "from this environment or that of --peer-python"
        ),
    ] = False,
    long_prompt: Annotated[
        bool, Meta(description="edge: measure what prompts of 128 k tokens do to other streams and to probes")
    ] = False,
    keys: Annotated[bool, Meta(description="edge: with API keys")] = False,
    workers: Annotated[
        str,
        Meta(
            description="route: numbers of workers, as 8,64,256: what a decision costs by itself, without NATS; "
            "whatif --zoo: sizes of the fleet (default 8,32,128)"
        ),
    ] = "",
    zoo: Annotated[
        bool, Meta(description="whatif: classes of synthetic traffic instead of the trace")
    ] = False,
    options: Annotated[ZooOptions, Options()],
    fleet: Annotated[
        int,
        Meta(ge=0, description="route: workers of the fleet whose router is queried over NATS (default 2)"),
    ] = 0,
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON")] = False,
) -> int:
    """Measure this machine."""
    from headwater.ops.bench import report

    if zoo and what != "whatif":
        raise ConfigError("--zoo is for bench whatif")
    if options != ZooOptions() and not zoo:
        raise ConfigError("options of the zoo need bench whatif --zoo")
    if zoo:
        from headwater.ops.bench.zoo import command as zoos

        zoos.run(options, _sizes(workers) if workers else (), peer=peer, as_json=as_json)
        return 0
    if peer and what != "index":
        raise ConfigError("--peer is for bench index and bench whatif --zoo")
    if long_prompt and what != "edge":
        raise ConfigError("--long-prompt is for bench edge")
    if keys and (what != "edge" or long_prompt):
        raise ConfigError("--keys is for bench edge, without --long-prompt")
    if workers and what != "route":
        raise ConfigError("--workers is for bench route and bench whatif --zoo")
    if fleet and (what != "route" or workers):
        raise ConfigError("--fleet is for bench route, without --workers")
    if workers:
        from headwater.ops.bench.route import decisions

        report.show(decisions.bench(_sizes(workers)), as_json=as_json)
        return 0
    if what == "whatif":
        from headwater.ops.bench import whatif

        whatif.show(whatif.bench(), as_json=as_json)
        return 0
    if what == "signal-age":
        from headwater.ops.bench.staleness import signal_age

        signal_age.show(signal_age.bench(), as_json=as_json)
        return 0
    if what == "replicas":
        from headwater.ops.bench.staleness import replicas

        replicas.show(replicas.bench(), as_json=as_json)
        return 0
    if what == "limits":
        from headwater.ops.bench import limits

        report.show(limits.bench(), as_json=as_json)
        return 0
    if what == "parsers":
        from headwater.ops.bench.parsers import bench as parsers

        report.show(parsers.bench(), as_json=as_json)
        return 0
    if what in ("hash", "index"):
        from headwater.ops.bench.index import hashing, lookup

        report.show(hashing.bench() if what == "hash" else lookup.bench(peer=peer), as_json=as_json)
        return 0
    return _in_a_fleet(what, long_prompt=long_prompt, keys=keys, workers=fleet, as_json=as_json)


def _sizes(text: str) -> list[int]:
    """The numbers of workers to measure. Raises `ConfigError`."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--workers {text}: give numbers of workers from 1, separated by commas, as 8,64,256"
        )
    return [int(part) for part in parts]


def _in_a_fleet(what: What, *, long_prompt: bool, keys: bool, workers: int, as_json: bool) -> int:
    from headwater.ops.bench import edge, log, media, nixl, report, snapshot
    from headwater.ops.bench import long_prompt as long_prompts
    from headwater.ops.bench.route import over_nats
    from headwater.ops.process import logging, signals

    logging.configure("warning")
    benches = {
        "edge": edge.bench,
        "log": log.bench,
        "media": media.bench,
        "nixl": nixl.bench,
        "route": over_nats.bench,
        "snapshot": snapshot.bench,
    }
    chosen = benches[what]
    if long_prompt:
        chosen = long_prompts.bench
    elif keys:
        chosen = edge.bench_with_keys
    elif workers:
        chosen = partial(over_nats.bench, workers)

    async def run(_stop: object) -> int:
        report.show(await chosen(), as_json=as_json)
        return 0

    return signals.run(run)
