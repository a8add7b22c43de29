"""Commands that debug a fleet by its logs: follow, compare, search and explain them."""

from typing import Annotated

from msgspec import Meta

from headwater.engines.traits import Text
from headwater.ops.config.command import AnyWord, Json, command
from headwater.ops.config.processes import PoolReader
from headwater.ops.config.setting import ConfigError, Flag

PLACE = (
    "a position of the pool's log, a time (2026-11-26T21:05:00, UTC), a time before now (-5m), a bookmark, "
    "start or end"
)


@command(notes="Exit status: 0, or 1 if there is no such event.")
async def tail(
    settings: PoolReader,
    *,
    kind: Annotated[
        str, Meta(description="only these kinds of events: fleet, kv, load, route, shadow, req; with commas")
    ] = "",
    event: Annotated[
        str, Meta(description="only events of these names, such as route.decided; with commas")
    ] = "",
    worker: Annotated[str, Meta(description="only events of or about this worker")] = "",
    request: Annotated[str, Meta(description="only events that name this request")] = "",
    start: Annotated[
        str,
        Flag("from"),
        AnyWord(),
        Meta(description=f"begin there: {PLACE} (default: 20 messages before its end)"),
    ] = "",
    follow: Annotated[bool, Meta(description="wait for further events, until Ctrl-C")] = True,
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON, a line per event")] = False,
) -> int:
    """Show the events of a pool's log and of the request log in the order of time."""
    from headwater.ops.debug import tail as debug

    selection = debug.read_wanted(kind, event, worker, request)
    return await debug.tail(settings.nats, settings.pool, selection, start, follow=follow, as_json=as_json)


@command
async def diff(
    a: Annotated[str, Flag("A"), AnyWord(), Meta(description=PLACE)],
    b: Annotated[str, Flag("B"), AnyWord(), Meta(description="likewise, after A")],
    /,
    *,
    settings: PoolReader,
    as_json: Json = False,
) -> int:
    """Show what differs between a pool's states at two places of its log: workers, load, cached blocks, and events between."""
    from headwater.ops.debug import diff as debug

    return await debug.diff(settings.nats, settings.pool, a, b, as_json=as_json)


@command
async def top(
    settings: PoolReader,
    *,
    once: Annotated[bool, Meta(description="print the table once; without a terminal it always is")] = False,
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON, once")] = False,
) -> int:
    """Show a pool's workers, every second until Ctrl-C: load, KV cache, hit rate and TTFT of the last minute."""
    from headwater.ops.debug import top as debug

    return await debug.top(settings.nats, settings.pool, once=once, as_json=as_json)


@command(notes="Exit status: 0, or 1 if it nowhere holds.")
async def bisect(
    settings: PoolReader,
    *,
    when: Annotated[
        str,
        Meta(
            description='condition on the state: worker("w3").cached_blocks < 100, workers.ready < 4, '
            'worker("w1").state == "draining"; the guide "Debugging a fleet" lists all facts'
        ),
    ],
    start: Annotated[
        str, Flag("from"), AnyWord(), Meta(description=f"begin there: {PLACE} (default: the log's start)")
    ] = "",
    end: Annotated[str, Flag("to"), AnyWord(), Meta(description="end there, likewise")] = "end",
    as_json: Json = False,
) -> int:
    """Find the first position of a pool's log where a condition on the folded state begins to hold."""
    from headwater.ops.debug import bisect as debug
    from headwater.ops.debug.predicate import parse

    predicate = parse(when)
    return await debug.bisect(settings.nats, settings.pool, predicate, start, end, as_json=as_json)


@command(notes="Exit status: 0, or 1 if the log has no decision for the request.")
async def why_not(
    request: Annotated[str, Meta(description="request id, as in the header x-request-id")],
    worker: Annotated[str, Meta(description="worker that the request did not go to")],
    /,
    *,
    settings: PoolReader,
    as_json: Json = False,
) -> int:
    """Explain what would have had to differ for a request to go to a worker: a filter, or its cost, part by part."""
    from headwater.ops.debug import why_not as debug

    return await debug.why_not(settings.nats, settings.pool, request, worker, as_json=as_json)


@command(notes="Exit status: 0 if there are none, 1 if there are.")
async def stuck(
    settings: PoolReader,
    *,
    quiet: Annotated[
        float,
        Text(float, str, "SECONDS"),
        Meta(ge=0, description="list requests without an event for so many seconds"),
    ] = 10.0,
    as_json: Json = False,
) -> int:
    """List a pool's open requests that make no progress, by the logs: what each waits for, since when, and the remedy."""
    from headwater.ops.debug import stuck as debug

    return await debug.stuck(settings.nats, settings.pool, quiet, as_json=as_json)


@command
async def export(
    settings: PoolReader,
    *,
    perfetto: Annotated[
        bool, Meta(description="as a trace in Chrome's JSON format, for ui.perfetto.dev")
    ] = False,
    output: Annotated[str, Flag("output", "o"), Meta(description="file to write; - for standard output")],
    start: Annotated[
        str, Flag("from"), AnyWord(), Meta(description=f"begin there: {PLACE} (default: the log's start)")
    ] = "",
    end: Annotated[str, Flag("to"), AnyWord(), Meta(description="end there, likewise")] = "end",
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON about what was written")] = False,
) -> int:
    """Export a part of the logs as a trace: the stages of each request at its edge and its workers, load, and changes of the fleet."""
    from headwater.ops.debug import export as debug

    if not perfetto:
        raise ConfigError("export: name the format: --perfetto")
    return await debug.export(settings.nats, settings.pool, output, start, end, as_json=as_json)
