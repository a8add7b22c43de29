"""Commands that debug a fleet by its logs: follow, compare, search and explain them."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import AnyWord, command
from headwater.ops.config.processes import PoolReader
from headwater.ops.config.setting import Flag

Json = Annotated[bool, Flag("json"), Meta(description="print JSON")]


@command(notes="Exit status: 0, or 1 if there is no such event.")
def tail(
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
        Meta(
            description="begin at a position of the pool's log, a time (2026-11-26T21:05:00, UTC), a time before now (-5m), "
            "a bookmark, start or end (default: 20 messages before its end)"
        ),
    ] = "",
    follow: Annotated[bool, Meta(description="wait for further events, until Ctrl-C")] = True,
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON, a line per event")] = False,
) -> int:
    """Show the events of a pool's log and of the request log in the order of time."""
    from headwater.ops.debug import tail as debug
    from headwater.ops.process import signals

    wanted = debug.read_wanted(kind, event, worker, request)
    return signals.run_command(
        lambda: debug.tail(settings.nats, settings.pool, wanted, start, follow=follow, as_json=as_json)
    )
