"""`headwater top`: the workers of a pool as the folded state has them now, and what its requests met in the last minute.

It is shown on a screen that is replaced again and again.
"""

import asyncio
import shutil
import statistics
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TextIO

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.events.ports import Record, Slice, Unreadable
from headwater.ops.config.sections import NatsSettings
from headwater.ops.debug.places import PoolLog, follow, open_log, running, state_at
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.terminal import iso_time, table
from headwater.router.state import RouterState, in_order
from headwater.router.worker import Worker, state_of
from headwater.schemas.events import LoadReported, RequestStarted
from headwater.schemas.routing import Decision

ENTER: Final = "\x1b[?1049h\x1b[?25l"
"""The alternate screen, without a cursor: what was on the terminal comes back at the end."""

LEAVE: Final = "\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@contextmanager
def full_screen(out: TextIO) -> Iterator[None]:
    """However the block ends, the terminal is then as it was."""
    out.write(ENTER)
    try:
        yield
    finally:
        out.write(LEAVE)
        out.flush()


def redraw(out: TextIO, text: str) -> None:
    """Replace what is shown on a full screen; what does not fit is cut, and the last line says so."""
    columns, rows = shutil.get_terminal_size()
    lines = text.splitlines()
    if len(lines) > rows:
        lines = [*lines[: rows - 1], f"… and {len(lines) - rows + 1} more"]
    shown = f"{REST_OF_LINE}\r\n".join([line[:columns] for line in lines])
    out.write(f"{HOME}{shown}{REST_OF_LINE}{REST_OF_SCREEN}")
    out.flush()


WINDOW_NS: Final = 60_000_000_000
PERIOD_S: Final = 1.0

PROMPTS_MAX: Final = 100_000
"""Requests whose prompt's length is remembered until it is computed."""


class First(NamedTuple):
    """The first token of a request, and the milliseconds to it."""

    stored_ns: int
    worker: str
    ttft_ms: float


class Computed(NamedTuple):
    """A prompt that a worker computed, and how much of it was cached."""

    stored_ns: int
    worker: str
    cached: int
    tokens: int


class WorkerRow(msgspec.Struct, frozen=True):
    """What is shown of a worker. `hit_rate` and `ttft_p50_ms` are of the last minute, None if nothing is known."""

    worker: str
    state: str
    role: str
    running: int
    waiting: int
    kv_used: float
    queued_tokens: int
    requests: int
    cached_blocks: int
    step_ms: float
    hit_rate: float | None
    ttft_p50_ms: float | None


class Present:
    """The folded state, followed, and the last minute's requests."""

    def __init__(self, state: RouterState) -> None:
        self.state = state
        self.firsts: deque[First] = deque()
        self.computed: deque[Computed] = deque()
        self._prompts: dict[str, int] = {}

    def apply_pool(self, piece: Slice) -> None:
        """Fold a part of the pool's log."""
        for message in in_order(piece):
            if isinstance(message, Unreadable):
                self.state.skip(message)
                continue
            self.state.apply(message)
            for event in message.batch.events:
                if isinstance(event, Decision) and event.leg != "decode":
                    self._prompts[event.request] = event.prompt_tokens
                    if len(self._prompts) > PROMPTS_MAX:
                        del self._prompts[next(iter(self._prompts))]
                elif isinstance(event, LoadReported) and event.prefilled:
                    self._note(message, event)

    def _note(self, record: Record, event: LoadReported) -> None:
        for request, cached in zip(event.prefilled, event.cached, strict=False):
            tokens = self._prompts.pop(request, 0)
            if tokens and cached >= 0:
                self.computed.append(Computed(record.stored_ns, record.batch.writer, cached, tokens))

    def apply_requests(self, piece: Slice) -> None:
        """Note the first tokens in a part of the request log. It has those of all pools."""
        for record, event in piece.events():
            if isinstance(event, RequestStarted):
                self.firsts.append(First(record.stored_ns, event.worker, event.ttft_ms))

    def rows(self, now_ns: int) -> list[WorkerRow]:
        """Every worker, by name."""
        _forget(self.firsts, now_ns)
        _forget(self.computed, now_ns)
        return [self._row(worker) for _, worker in sorted(self.state.loads.workers.items())]

    def ttft_ms(self, worker: str = "") -> float | None:
        """The median of the last minute, of one worker or of all of the pool."""
        times = [
            first_token.ttft_ms
            for first_token in self.firsts
            if first_token.worker == worker or (not worker and first_token.worker in self.state.loads.workers)
        ]
        return round(statistics.median(times), 1) if times else None

    def _row(self, worker: Worker) -> WorkerRow:
        worker_samples = [sample for sample in self.computed if sample.worker == worker.name]
        tokens = sum(sample.tokens for sample in worker_samples)
        cold = " (cold)" if worker.name in self.state.cold else ""
        return WorkerRow(
            worker.name,
            state_of(worker) + cold,
            worker.role,
            worker.running,
            worker.waiting,
            round(worker.used_blocks / max(1, worker.total_blocks), 4),
            worker.prefill_tokens,
            len(worker.requests),
            self.state.index.blocks.get(worker.name, 0),
            round(worker.step_ms, 2),
            round(sum(sample.cached for sample in worker_samples) / tokens, 4) if tokens else None,
            self.ttft_ms(worker.name),
        )


def _forget(events: deque[Any], now_ns: int) -> None:
    while events and events[0].stored_ns < now_ns - WINDOW_NS:
        events.popleft()


class Started(NamedTuple):
    """The present state, and the positions of both logs from which it is followed."""

    present: Present
    pool_after: int
    requests_after: int


async def begin(ports: Ports, log: PoolLog) -> Started:
    """Fold up to the end of the logs; the last minute is looked at event by event."""
    before_ns = log.now_ns() - WINDOW_NS
    pool_until, requests_until = (await log.log.bounds()).last, (await ports.requests.bounds()).last
    present = Present(await state_at(log, await log.log.position_at(before_ns)))
    async for piece in log.log.scan(present.state.position, pool_until):
        present.apply_pool(piece)
    async for piece in ports.requests.scan(await ports.requests.position_at(before_ns), requests_until):
        present.apply_requests(piece)
    return Started(present, pool_until, requests_until)


async def top(nats: NatsSettings, pool: str, *, once: bool, as_json: bool) -> int:
    """Show the workers every second until interrupted; once if `once`, as JSON, and where there is no terminal."""
    async with operator_ports(nats, "top") as ports:
        pool = await choose_pool(ports, pool)
        log = await open_log(ports, pool)
        started = await begin(ports, log)
        # A capture does not grow.
        if once or as_json or nats.capture or not sys.stdout.isatty():
            print((as_line if as_json else as_text)(pool, started.present, log.now_ns()))
            return 0
        return await live(ports, pool, log, started, sys.stdout)


async def live(ports: Ports, pool: str, log: PoolLog, started: Started, out: TextIO) -> int:
    """Follow the logs and show the workers again every second. Does not return."""
    present = started.present
    with full_screen(out):
        async with running(
            follow(log.log, started.pool_after, present.apply_pool),
            follow(ports.requests, started.requests_after, present.apply_requests),
        ):
            while True:
                redraw(out, as_text(pool, present, log.now_ns()))
                await asyncio.sleep(PERIOD_S)


def as_text(pool: str, present: Present, now_ns: int) -> str:
    """Two lines about the pool, and the table of its workers, which fits a terminal of 80 columns."""
    rows = present.rows(now_ns)
    ready = sum(row.state.startswith("ready") for row in rows)
    ttft_ms = present.ttft_ms()
    met = f", TTFT p50 {ttft_ms} ms" if ttft_ms is not None else ""
    head = (
        f"pool {pool}, position {present.state.position}, {iso_time(now_ns)}\n"
        f"{ready} of {len(rows)} workers ready, {present.state.index.rows} distinct blocks; "
        f"{len(present.firsts)} first tokens in a minute{met}"
    )
    columns = (
        *("worker", "state", "role", "run", "wait", "KV", "queued", "reqs"),
        *("blocks", "step", "hits", "TTFT"),
    )
    cells = [
        (
            *(row.worker, row.state, row.role, row.running, row.waiting, f"{row.kv_used:.0%}".rjust(4)),
            *(row.queued_tokens, row.requests, row.cached_blocks, row.step_ms or "-"),
            "-" if row.hit_rate is None else f"{row.hit_rate:.0%}",
            "-" if row.ttft_p50_ms is None else row.ttft_p50_ms,
        )
        for row in rows
    ]
    return f"{head}\n{table(columns, cells)}" if rows else f"{head}\nno worker has joined this pool"


def as_line(pool: str, present: Present, now_ns: int) -> str:
    """The same as an object."""
    facts = {"time": iso_time(now_ns), "pool": pool, "position": present.state.position}
    return msgspec.json.encode({**facts, "workers": present.rows(now_ns)}).decode()
