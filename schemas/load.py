"""Load of one worker. Stream: pool log, kind `load`. Worker and epoch are the batch's writer and epoch."""

from headwater.schemas.envelope import Event


class LoadReported(Event, frozen=True, tag="load.reported"):
    """What the engine says of itself, and which requests moved on since the last report.

    `running` and `waiting` count requests, `used_blocks` KV blocks in use. The three lists name requests:
    taken into the engine, prompt computed (first token out), and ended for whatever reason. `cached` are the prompt tokens
    that the engine had, one number for each of `prefilled`, -1 where it did not say. `prefills` are measured: (prompt tokens
    computed, microseconds that it took); `step_us` is the mean time between two tokens of a request, 0 if there were none.
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


class RequestsHeld(Event, frozen=True, tag="load.held"):
    """Every request that the engine has now: any other that it once accepted has ended.

    Part of an announcement, after a life began or a part of the log was lost.
    """

    requests: tuple[str, ...]
