"""`headwater bench`: measurements of a server, and of this machine."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from headwater.ops.bench.options import Arrivals, Output, Target, Traffic
from headwater.ops.config.command import Json, Options, command, group
from headwater.ops.config.setting import ConfigError

if TYPE_CHECKING:
    from headwater.ops.bench.report import Report


@command
async def serve(
    url: Annotated[str, Meta(description="URL of the server, as http://HOST:PORT")],
    /,
    *,
    traffic: Annotated[Traffic, Options()],
    arrivals: Annotated[Arrivals, Options()],
    target: Annotated[Target, Options()],
    output: Annotated[Output, Options()],
) -> int:
    """Measure a server of OpenAI's API under load: latencies, throughput, and goodput within limits.

    Exit codes: 0 if all requests succeeded, 1 if one failed, 2 if something given is wrong or the server is out of reach.
    """
    from headwater.ops.bench import serve as bench_serve

    return await bench_serve.serve(url, traffic, arrivals, target, output)


@command
def hashing(*, as_json: Json = False) -> int:
    """Measure block hashes of prompts."""
    from headwater.ops.bench import index as bench_index
    from headwater.ops.bench import report

    report.show(bench_index.bench_hashing(), as_json=as_json)
    return 0


@command
def index(*, as_json: Json = False) -> int:
    """Measure the router's prefix index."""
    from headwater.ops.bench import index as bench_index
    from headwater.ops.bench import report

    report.show(bench_index.bench(), as_json=as_json)
    return 0


@command
def edge(
    *,
    long_prompt: Annotated[
        bool, Meta(description="measure what prompts of 128 k tokens do to other streams and to probes")
    ] = False,
    keys: Annotated[bool, Meta(description="with API keys")] = False,
    against: Annotated[
        str,
        Meta(
            description="commit of this Git checkout: run both in turns, and show the ratio (three rounds of each)"
        ),
    ] = "",
    as_json: Json = False,
) -> int:
    """Measure an edge in a simulated fleet."""
    from headwater.ops.bench import edge, report
    from headwater.ops.bench import long_prompt as long_prompts

    if long_prompt and keys:
        raise ConfigError("--keys is for bench edge without --long-prompt")
    if against:
        words = ["edge", *(["--keys"] if keys else []), *(["--long-prompt"] if long_prompt else [])]
        report.show(edge.bench_against(words, against), as_json=as_json)
        return 0
    bench = long_prompts.bench if long_prompt else edge.bench_with_keys if keys else edge.bench
    return _measured(bench, as_json=as_json)


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
    from headwater.ops.bench import route as bench_route

    if workers and fleet:
        raise ConfigError("--fleet is for bench route without --workers")
    if workers:
        report.show(bench_route.bench(_numbers("--workers", "workers", workers)), as_json=as_json)
        return 0
    return _measured(
        partial(bench_route.bench_over_nats, fleet) if fleet else bench_route.bench_over_nats, as_json=as_json
    )


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
def nixl(*, as_json: Json = False) -> int:
    """Measure transfers between processes over NIXL."""
    from headwater.ops.bench import nixl

    return _measured(nixl.bench, as_json=as_json)


bench = group(
    "bench",
    None,
    serve=serve,
    hash=hashing,
    index=index,
    edge=edge,
    route=route,
    snapshot=snapshot,
    log=log,
    nixl=nixl,
)


def _numbers(flag: str, unit: str, text: str) -> list[int]:
    """Numbers from 1, separated by commas. Raises `ConfigError`."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{flag} {text}: give numbers of {unit} from 1, separated by commas, as 8,64,256")
    return [int(part) for part in parts]


def _measured(bench: "Callable[[], Awaitable[Report]]", *, as_json: bool) -> int:
    """Run a measurement that starts processes, and print its report."""
    from headwater.engines import logs
    from headwater.ops.bench import report
    from headwater.ops.start import signals

    logs.configure("warning")

    async def run(_stop: object) -> int:
        report.show(await bench(), as_json=as_json)
        return 0

    return signals.run(run)
