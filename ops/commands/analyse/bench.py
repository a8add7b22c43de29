"""`headwater bench`: measurements of this machine."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from headwater.ops.bench.zoo.options import ZooOptions
from headwater.ops.config.command import Options, command, group
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.setting import Flag

if TYPE_CHECKING:
    from headwater.ops.bench.report import Report

Json = Annotated[bool, Flag("json"), Meta(description="print JSON")]


@command
def hashing(*, as_json: Json = False) -> int:
    """Measure block hashes of prompts."""
    from headwater.ops.bench import report
    from headwater.ops.bench.index import hashing

    report.show(hashing.bench(), as_json=as_json)
    return 0


@command
def index(
    *,
    peer: Annotated[bool, Meta(description="measure a peer's index too, if it is installed")] = False,
    as_json: Json = False,
) -> int:
    """Measure the router's prefix index."""
    from headwater.ops.bench import report
    from headwater.ops.bench.index import lookup

    report.show(lookup.bench(peer=peer), as_json=as_json)
    return 0


@command
def edge(
    *,
    long_prompt: Annotated[
        bool, Meta(description="measure what prompts of 128 k tokens do to other streams and to probes")
    ] = False,
    keys: Annotated[bool, Meta(description="with API keys")] = False,
    as_json: Json = False,
) -> int:
    """Measure an edge in a simulated fleet."""
    from headwater.ops.bench import edge
    from headwater.ops.bench import long_prompt as long_prompts

    if long_prompt and keys:
        raise ConfigError("--keys is for bench edge without --long-prompt")
    bench = long_prompts.bench if long_prompt else edge.bench_with_keys if keys else edge.bench
    return _measured(bench, as_json=as_json)


@command
def limits(*, as_json: Json = False) -> int:
    """Simulate rate limits over several edges."""
    from headwater.ops.bench import limits, report

    report.show(limits.bench(), as_json=as_json)
    return 0


@command
def route(
    *,
    workers: Annotated[
        str,
        Meta(description="numbers of workers, as 8,64,256: what a decision costs by itself, without NATS"),
    ] = "",
    fleet: Annotated[
        int, Meta(ge=0, description="workers of the fleet whose router is queried over NATS (default 2)")
    ] = 0,
    as_json: Json = False,
) -> int:
    """Measure routing decisions, over NATS or by themselves."""
    from headwater.ops.bench import report
    from headwater.ops.bench.route import decisions, over_nats

    if workers and fleet:
        raise ConfigError("--fleet is for bench route without --workers")
    if workers:
        report.show(decisions.bench(_numbers("--workers", "workers", workers)), as_json=as_json)
        return 0
    return _measured(partial(over_nats.bench, fleet) if fleet else over_nats.bench, as_json=as_json)


@command
def snapshot(*, as_json: Json = False) -> int:
    """Measure a router's snapshots."""
    from headwater.ops.bench import snapshot

    return _measured(snapshot.bench, as_json=as_json)


@command
def log(*, as_json: Json = False) -> int:
    """Measure appends to the log, and reading it."""
    from headwater.ops.bench import log

    return _measured(log.bench, as_json=as_json)


@command
def media(*, as_json: Json = False) -> int:
    """Measure how long an image in flight keeps the edge's event loop from others."""
    from headwater.ops.bench.media.bench import bench

    return _measured(bench, as_json=as_json)


@command
def nixl(*, as_json: Json = False) -> int:
    """Measure transfers between processes over NIXL."""
    from headwater.ops.bench import nixl

    return _measured(nixl.bench, as_json=as_json)


@command
def whatif(
    *,
    zoo: Annotated[bool, Meta(description="classes of synthetic traffic instead of the trace")] = False,
    peer: Annotated[
        bool,
        Meta(
            description="with --zoo: also replay with the peer, from this environment or that of --peer-python"
        ),
    ] = False,
    workers: Annotated[
        str, Meta(description="with --zoo: sizes of the fleet (default 8,32,128), separated by commas")
    ] = "",
    options: Annotated[ZooOptions, Options()],
    as_json: Json = False,
) -> int:
    """Simulate the router on the public trace, or on classes of synthetic traffic."""
    if zoo:
        from headwater.ops.bench.zoo import command as zoos

        zoos.run(
            options, _numbers("--workers", "workers", workers) if workers else (), peer=peer, as_json=as_json
        )
        return 0
    if peer or workers or options != ZooOptions():
        raise ConfigError("--peer, --workers and the options of the zoo need bench whatif --zoo")
    from headwater.ops.bench import whatif

    whatif.show(whatif.bench(), as_json=as_json)
    return 0


@command
def signal_age(*, as_json: Json = False) -> int:
    """Simulate late events: what their delay costs."""
    from headwater.ops.bench.staleness import signal_age

    signal_age.show(signal_age.bench(), as_json=as_json)
    return 0


@command
def replicas(
    *,
    routers: Annotated[
        str, Meta(description="numbers of routers to compare; the first is what the others are compared with")
    ] = "1,2,4,8",
    requests: Annotated[
        int, Meta(ge=1, description="about how many requests; 20,000 take some minutes for each number")
    ] = 20_000,
    as_json: Json = False,
) -> int:
    """Simulate several routers that fold one log."""
    from headwater.ops.bench.staleness import replicas

    counts = _numbers("--routers", "routers", routers)
    replicas.show(replicas.bench(counts, requests=requests), as_json=as_json)
    return 0


@command
def parsers(*, as_json: Json = False) -> int:
    """Measure the output parsers on recorded outputs of models."""
    from headwater.ops.bench import report
    from headwater.ops.bench.parsers import bench as parsers

    report.show(parsers.bench(), as_json=as_json)
    return 0


bench = group(
    "bench",
    None,
    **{
        "hash": hashing,
        "index": index,
        "edge": edge,
        "limits": limits,
        "route": route,
        "snapshot": snapshot,
        "log": log,
        "media": media,
        "nixl": nixl,
        "whatif": whatif,
        "signal-age": signal_age,
        "replicas": replicas,
        "parsers": parsers,
    },
)


def _numbers(flag: str, what: str, text: str) -> list[int]:
    """Numbers from 1, separated by commas. Raises `ConfigError`."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{flag} {text}: give numbers of {what} from 1, separated by commas, as 8,64,256")
    return [int(part) for part in parts]


def _measured(bench: "Callable[[], Awaitable[Report]]", *, as_json: bool) -> int:
    """Run a measurement that starts processes, and print its report."""
    from headwater.ops.bench import report
    from headwater.ops.process import logging, signals

    logging.configure("warning")

    async def run(_stop: object) -> int:
        report.show(await bench(), as_json=as_json)
        return 0

    return signals.run(run)
