"""Load of one worker. Stream: pool log, kind `load`. Worker and epoch are the batch's writer and epoch."""

from headwater.schemas.events.event import Event


class LoadReported(Event, frozen=True, tag="load.reported"):
    """The engine's load, and the progress of requests since the last report.

    `running` and `waiting` count requests, `used_blocks` KV blocks in use. The three lists name requests: accepted by
    the engine, prefilled (first token generated), and ended for any reason. `cached` are cached prompt tokens, one number
    for each of `prefilled`, -1 where the engine did not report it. `prefills` are measurements: (prompt tokens computed,
    duration in µs); `step_us` is the mean time between two tokens of a request over `gaps` such times, 0 if there were none. `outputs` are
    (`max_tokens`, tokens generated) of the answers that ended by themselves or at their limit. `encodes`, of workers that read embeddings, are (prompt tokens computed, images encoded for
    that, tokens of these, duration of both in µs), and `reads` (tokens of an image whose embedding was read, duration in µs). `answered`
    are (prompt tokens, digest of the tenant or 0) of the requests of `outputs`, one for each.
    """

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    accepted: tuple[str, ...] = ()
    prefilled: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    cached: tuple[int, ...] = ()
    prefills: tuple[tuple[int, int], ...] = ()
    step_us: int = 0
    gaps: int = 0
    outputs: tuple[tuple[int, int], ...] = ()
    encodes: tuple[tuple[int, int, int, int], ...] = ()
    reads: tuple[tuple[int, int], ...] = ()
    answered: tuple[tuple[int, int], ...] = ()


class RequestsHeld(Event, frozen=True, tag="load.held"):
    """All requests that the engine has now: any other that it accepted has ended.

    Part of an announcement, after an incarnation started or a part of the log was lost.
    """

    requests: tuple[str, ...]
