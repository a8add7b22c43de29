"""`headwater tail`: events of a pool's log and of the request log, merged by the time at which the server stored them.

An event is one line of text for people, or plain data for programs.
"""

import asyncio
import difflib
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from operator import attrgetter
from typing import Any, Final, NamedTuple, get_args

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.events.ports import Gap, Log, Record, Slice, Unreadable
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.debug.places import PoolLog, find_position, merged, open_log, running, stored_at
from headwater.ops.history.explanation import event_line
from headwater.ops.history.requests import is_attempt_of
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.terminal import iso_time
from headwater.router.state import in_order
from headwater.schemas import subjects
from headwater.schemas.encoding import LogEvent
from headwater.schemas.events import (
    TIER_NAMES,
    BlocksRemoved,
    BlocksStored,
    Event,
    LoadReported,
    RequestsHeld,
    RequestsOpen,
    WorkerChanged,
    WorkerControlled,
    WorkerJoined,
)
from headwater.schemas.hashing import HASH_BYTES, unpack_hashes
from headwater.schemas.routing import Decision
from headwater.schemas.subjects import ANY, POOL_KINDS, PoolKind, pool_kind

NAMES_MAX: Final = 4
"""Requests of a load report that a line names."""

HASHES: Final = frozenset({"hashes", "assumed"})
"""Fields that are packed block hashes."""


def tag_of(event: Event) -> str:
    """The name of an event's type in the log, such as `route.decided`."""
    return str(type(event).__struct_config__.tag)


def text_of(event: Event) -> str:
    """What an event says, without its name."""
    match event:
        case BlocksStored(hashes=hashes, parent=parent, tier=tier):
            after = f"after {parent:016x}" if parent else "from the start of a prompt"
            return f"{_blocks(hashes)} {after} on {TIER_NAMES[tier]}"
        case BlocksRemoved(hashes=hashes, tier=tier):
            return f"{_blocks(hashes)} from {TIER_NAMES[tier]}"
        case LoadReported():
            return _load(event)
        case RequestsHeld(requests=requests):
            return f"{len(requests)} requests{_names(': ', requests)}"
        case Decision():
            return _decision(event)
        case WorkerJoined() | WorkerChanged():
            return _worker(event)
        case WorkerControlled(arguments=arguments):
            rest = event_line(msgspec.structs.replace(event, arguments=b""))
            return f"{rest.partition(': ')[2]}, arguments {arguments.decode(errors='replace')}"
        case _:
            text = event_line(event).partition(": ")[2]
            # That line is for a request whose name is known.
            request = getattr(event, "request", "")
            return f"{request}: {text}" if request else text


def _worker(event: WorkerJoined | WorkerChanged) -> str:
    """A worker's properties, without those that only programs compare."""
    if isinstance(event, WorkerJoined):
        parts = [
            f"{event.model} on {event.engine}",
            event.role,
            f"{event.total_blocks} blocks of {event.block_size} tokens",
            f"at most {event.max_running} running",
        ]
        parts += [f"tier {event.tier}"] if event.tier else []
    else:
        parts = [event.state, event.role]
        parts += [f"adapters {' '.join(event.loras)}"] if event.loras else []
    parts += [f"taints {' '.join(event.taints)}"] if event.taints else []
    return f"{event.worker}.{event.epoch}: {', '.join(parts)}"


def _blocks(hashes: bytes) -> str:
    count = len(hashes) // HASH_BYTES
    return f"{count} block{'s' if count != 1 else ''}"


def _names(title: str, requests: tuple[str, ...]) -> str:
    if not requests:
        return ""
    rest = f" and {len(requests) - NAMES_MAX} more" if len(requests) > NAMES_MAX else ""
    return f"{title}{', '.join(requests[:NAMES_MAX])}{rest}"


def _load(event: LoadReported) -> str:
    step = f", step {event.step_us / 1000:.1f} ms" if event.step_us else ""
    lists = (
        _names("; accepted ", event.accepted)
        + _names("; first token ", event.prefilled)
        + _names("; ended ", event.finished)
    )
    used = f"KV {event.used_blocks} of {event.total_blocks}"
    return f"running {event.running}, waiting {event.waiting}, {used}{step}{lists}"


def _decision(event: Decision) -> str:
    leg = f" ({event.leg})" if event.leg else ""
    unit = " ms" if any(candidate.prefill_ms for candidate in event.candidates) else ""
    waited = f", after {event.waited_ms} ms in the queue" if event.waited_ms else ""
    chosen = event.chosen
    scored = event.scored or len(event.candidates)
    return (
        f"{event.request} to {event.worker}.{event.epoch}{leg}: {chosen.cached_blocks} of {event.blocks} blocks cached, "
        f"cost {chosen.score:.2f}{unit}, {scored} candidate{'s' if scored != 1 else ''}{waited}"
    )


def data_of(event: Event) -> dict[str, Any]:
    """The fields of an event by name; block hashes in hex, other bytes in base64 (by the encoder)."""
    fields: dict[str, Any] = _plain(event)
    return fields


def _plain(value: Any, field: str = "") -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name), name) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_plain(element) for element in value]
    if isinstance(value, bytes) and field in HASHES:
        return [f"{element:016x}" for element in unpack_hashes(value).tolist()]
    return value


REQUESTS: Final = "req"
KINDS: Final = (*POOL_KINDS, REQUESTS)
TAGS: Final = {tag: kind for kind in get_args(LogEvent) for tag in (str(kind.__struct_config__.tag),)}
"""The type of each event by its name in the log."""

RECENT: Final = 20
"""Messages of the pool's log that are shown first where no start is given."""

SETTLE_S: Final = 0.1
"""How long events of both logs are collected before they are shown in order, while following."""

NAMES_NO_REQUEST: Final = ("fleet", "kv")
"""Kinds whose events name no request."""

OF_ONE_WORKER: Final = ("kv", "load")
"""Kinds whose events are all of the worker that writes them."""


class Wanted(NamedTuple):
    """Which events to show; empty: all."""

    kinds: frozenset[str] = frozenset(KINDS)
    names: frozenset[str] = frozenset()
    worker: str = ""
    request: str = ""

    def pool_subjects(self, ns: str, pool: str) -> tuple[str, ...]:
        """The subjects of the pool's log that may hold such events."""
        kinds = [kind for kind in POOL_KINDS if kind in self.all_kinds]
        if len(kinds) == len(POOL_KINDS) and not self.worker:
            return (subjects.pool_filter(ns, pool),)
        return tuple(subjects.pool_subject(ns, pool, kind, self._writer(kind)) for kind in kinds)

    def _writer(self, kind: PoolKind) -> str:
        return self.worker if self.worker and kind in OF_ONE_WORKER else ANY

    @property
    def of_requests(self) -> bool:
        """May the request log hold such events?"""
        return REQUESTS in self.all_kinds

    @property
    def all_kinds(self) -> frozenset[str]:
        """The kinds that may hold such events."""
        kinds = self.kinds - frozenset(NAMES_NO_REQUEST if self.request else ())
        return kinds & {_kind_of(name) for name in self.names} if self.names else kinds

    def keeps(self, record: Record, event: Event) -> bool:
        """Is it one of them?"""
        if self.names:
            if tag_of(event) not in self.names:
                return False
        elif isinstance(event, RequestsOpen):
            # It comes with every batch, and is for the edge itself.
            return False
        if self.worker and self.worker not in (getattr(event, "worker", ""), record.batch.writer):
            return False
        return not self.request or any(
            is_attempt_of(request_name, self.request) for request_name in requests_of(event)
        )


def requests_of(event: Event) -> tuple[str, ...]:
    """The requests that an event names."""
    match event:
        case LoadReported(accepted=accepted, prefilled=prefilled, finished=finished):
            return (*accepted, *prefilled, *finished)
        case RequestsHeld(requests=requests):
            return requests
        case _:
            name = getattr(event, "request", "")
            return (name,) if name else ()


def _kind_of(name: str) -> str:
    """The kind of the subjects that carry events of this name."""
    return "shadow" if name == "route.shadowed" else name.partition(".")[0]


def read_wanted(kinds: str, names: str, worker: str, request: str) -> Wanted:
    """The filters of a command line. Raises `ConfigError`."""
    chosen_kinds = _listed(kinds, KINDS, "--kind", "kinds")
    events = _listed(names, tuple(TAGS), "--event", "events")
    filters = Wanted(chosen_kinds or frozenset(KINDS), events, worker, request)
    if not filters.of_requests and not filters.pool_subjects("ns", "p"):
        flags = " and ".join(
            flag for flag, text in (("--kind", kinds), ("--event", names), ("--request", request)) if text
        )
        raise ConfigError(f"{flags} leave no event: leave one of them out")
    return filters


def _listed(text: str, choices: tuple[str, ...], flag: str, label: str) -> frozenset[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in choices:
            near = difflib.get_close_matches(name, choices, n=1)
            fix = f"did you mean {near[0]}?" if near else f"{label} are {', '.join(choices)}"
            raise ConfigError(f"{flag} {name}: {fix}")
    return frozenset(names)


class Shown(NamedTuple):
    """A message of a log with those of its events that are wanted; or what is not readable there."""

    stored_ns: int
    log: str
    position: int
    record: Record | None
    events: tuple[Event, ...] = ()
    problem: str = ""

    @property
    def order(self) -> tuple[int, str, int]:
        """By time; within a log by position."""
        return self.stored_ns, self.log, self.position


class Sources(NamedTuple):
    """Both logs, from where on each is read, and which subjects of the pool's log; `wanted` of either."""

    pool: PoolLog
    requests: Log
    wanted: Wanted
    pool_subjects: tuple[str, ...]
    pool_after: int
    requests_after: int


async def tail(
    nats: NatsSettings, pool: str, filters: Wanted, start: str, *, follow: bool, as_json: bool
) -> int:
    """Print the events from `start` on; with `follow` also those to come, until interrupted. 1 if there is none."""
    async with operator_ports(nats, "tail") as ports:
        pool = await choose_pool(ports, pool)
        # Nothing comes after the end of a capture.
        follow = follow and not nats.capture
        return await show(ports, pool, filters, start, follow=follow, as_json=as_json)


async def show(
    ports: Ports, pool: str, filters: Wanted, start: str = "", *, follow: bool = False, as_json: bool = False
) -> int:
    """See `tail`."""
    write = json_lines if as_json else text_lines
    sources = await open_sources(ports, pool, filters, start)
    until = (await sources.pool.log.bounds()).last, (await sources.requests.bounds()).last
    count = 0
    async with aclosing(past(sources, *until)) as shown_events:
        async for shown in shown_events:
            count += _print(shown, write)
    sys.stdout.flush()
    if follow:
        async with aclosing(coming(sources, *until)) as batches:
            async for batch in batches:
                for shown in batch:
                    count += _print(shown, write)
                sys.stdout.flush()
    if not count:
        print(f"no such event from position {sources.pool_after + 1} on", file=sys.stderr)
    return 0 if count else 1


def _print(shown: Shown, write: Callable[[Shown], Iterator[str]]) -> int:
    count = 0
    for line in write(shown):
        print(line)
        count += 1
    return count


async def open_sources(ports: Ports, pool: str, filters: Wanted, start: str) -> Sources:
    """Where reading begins in each log. Raises `ConfigError`."""
    log = await open_log(ports, pool)
    bounds = await log.log.bounds()
    if not start:
        after = max(bounds.first - 1, bounds.last - RECENT)
    elif start.isdecimal():
        after = await find_position(start, log, "--from") - 1
    else:
        after = await find_position(start, log, "--from")
        after -= start in ("start", "end")
    after = max(after, bounds.first - 1)
    stored_ns = await stored_at(log.log, after + 1) if after < bounds.last else log.now_ns()
    requests_after = await ports.requests.position_at(stored_ns - 1) if after >= bounds.first else 0
    names = filters.pool_subjects(ports.ns, pool)
    return Sources(log, ports.requests, filters, names, after, requests_after)


async def past(sources: Sources, pool_until: int, requests_until: int) -> AsyncGenerator[Shown, None]:
    """What both logs hold up to these positions, in the order of time."""
    streams: list[AsyncIterator[Shown]] = []
    for subject in sources.pool_subjects:
        # Each by itself: a scan of several subjects would receive all messages.
        pieces = sources.pool.log.scan(sources.pool_after, pool_until, (subject,))
        streams.append(_shown(pieces, "pool", sources.wanted))
    if sources.wanted.of_requests:
        pieces = sources.requests.scan(sources.requests_after, requests_until)
        streams.append(_shown(pieces, "requests", sources.wanted))
    async for entry in merged(streams, attrgetter("order")):
        yield entry


async def coming(sources: Sources, pool_after: int, requests_after: int) -> AsyncGenerator[list[Shown], None]:
    """What comes after these positions, in the order of time as far as it comes within `SETTLE_S`. Does not end."""
    queue: asyncio.Queue[Shown] = asyncio.Queue(maxsize=10_000)

    async def collect(log: Log, name: str, after: int) -> None:
        async with aclosing(log.read(after, follow=True)) as pieces:  # type: ignore[type-var]
            async for shown in _shown(pieces, name, sources.wanted):
                await queue.put(shown)

    work = []
    if sources.pool_subjects:
        work.append(collect(sources.pool.log, "pool", pool_after))
    if sources.wanted.of_requests:
        work.append(collect(sources.requests, "requests", requests_after))
    async with running(*work):
        while True:
            batch = [await queue.get()]
            await asyncio.sleep(SETTLE_S)
            while not queue.empty():
                batch.append(queue.get_nowait())
            yield sorted(batch, key=lambda shown: shown.order)


async def _shown(pieces: AsyncIterator[Slice], log: str, filters: Wanted) -> AsyncGenerator[Shown, None]:
    """The wanted events of some slices; what is missing or unreadable among them, whatever is wanted."""
    stored_ns = 0
    async for piece in pieces:
        if piece.gap is not None:
            yield Shown(stored_ns, log, piece.gap.last, None, (), _gone(piece.gap))
        for message in in_order(piece):
            if isinstance(message, Unreadable):
                # It has no time: that of the message before it, or of the next one.
                stored_ns = stored_ns or next((record.stored_ns for record in piece.records), 0)
                problem = f"unreadable message of {message.subject}: {message.reason}"
                yield Shown(stored_ns, log, message.position, None, (), problem)
                continue
            stored_ns = message.stored_ns
            if log == "pool" and pool_kind(message.subject) not in filters.all_kinds:
                continue
            events = tuple([event for event in message.batch.events if filters.keeps(message, event)])
            if events:
                yield Shown(stored_ns, log, message.position, message, events)


def _gone(gap: Gap) -> str:
    return f"positions {gap.first} to {gap.last} are gone: {gap.reason}"


def text_lines(shown: Shown) -> Iterator[str]:
    """Time, position, name, writer and content of each event, in columns."""
    time = iso_time(shown.stored_ns) if shown.stored_ns else "-"
    head = f"{time:<24} {shown.position:>9}"
    if shown.record is None:
        yield f"{head} {'-':<17} {shown.log}: {shown.problem}"
        return
    writer = f"{shown.record.batch.writer}.{shown.record.batch.epoch}"
    for event in shown.events:
        yield f"{head} {tag_of(event):<17} {writer:<16} {text_of(event)}".rstrip()


def json_lines(shown: Shown) -> Iterator[str]:
    """An object for each event."""
    head: dict[str, Any] = {"time": iso_time(shown.stored_ns), "log": shown.log, "position": shown.position}
    if shown.record is None:
        yield msgspec.json.encode({**head, "problem": shown.problem}).decode()
        return
    batch = shown.record.batch
    for event in shown.events:
        kind = pool_kind(shown.record.subject) if shown.log == "pool" else REQUESTS
        facts = {"kind": kind, "writer": batch.writer, "epoch": batch.epoch, "event": tag_of(event)}
        yield msgspec.json.encode({**head, **facts, "fields": data_of(event)}).decode()
