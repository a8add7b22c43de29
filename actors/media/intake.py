"""The media intake: fetches and decodes what clients name, in processes that can fail without harm.

One process (`IntakeProcess`: it takes a task, and gives a reply or ends) handles one item at a time. A process that crashes, exceeds its memory
or its time ends; its item gets an error, and the next item a new process. Nothing here blocks the event loop for longer than it takes to copy
`PIECE_BYTES`: contents are handed over in shared memory, written and read by threads.
"""

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_network
from typing import Final, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

import msgspec
import structlog

from headwater.actors.http.errors import NO_RETRY, ApiError
from headwater.actors.media.item import MediaItem, MemoryBudget, byte_count, map_values, media_id
from headwater.actors.media.request import (
    IMAGE_FORMATS,
    MESSAGE_BYTES_MAX,
    SEALS,
    DecodedMedia,
    DecodeTask,
    FetchPolicy,
    IntakeSettings,
    MediaCode,
    MediaError,
    MediaKind,
    MediaLimits,
    MediaSource,
    MediaTarget,
    ProcessSetup,
    Rejected,
    Reply,
)
from headwater.actors.media.sources import URL_CHARS_MAX, encoded_bytes_max

PROGRAM: Final = ("-m", "headwater.actors.media.program")

ENVIRONMENT: Final = ("PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that a process inherits. It has no others: no keys, tokens, proxies."""

SINGLE_THREADED: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}

END_S: Final = 1.0

_REPLY: Final = msgspec.msgpack.Decoder(Reply)


class TaskReply(NamedTuple):
    """A reply, and the descriptor of the decoded item, -1 if there is none. The receiver closes it."""

    reply: Reply
    descriptor: int


class IntakeProcess:
    """A process that handles one task at a time."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self._process = process
        self._link = link

    @classmethod
    async def start(cls, setup: ProcessSetup, program: Sequence[str] = PROGRAM) -> "IntakeProcess":
        """Start one. It has none of this process's descriptors but its end of a socket. Raises `OSError`."""
        parent_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent_socket.setblocking(False)
        spawning = asyncio.ensure_future(asyncio.to_thread(_spawn, program, child_socket))
        try:
            process = await asyncio.shield(spawning)
        except BaseException:
            parent_socket.close()
            spawning.add_done_callback(_discard)
            raise
        started = cls(process, parent_socket)
        parent_socket.send(msgspec.msgpack.encode(setup))
        return started

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def run(self, task: DecodeTask, content: int = -1) -> TaskReply:
        """Hand over a task, with a descriptor of its content, and wait for the reply.

        Raises `MediaError` if the process ended instead. After that, and if cancelled, it must be killed.
        """
        try:
            socket.send_fds(self._link, [msgspec.msgpack.encode(task)], [content] if content >= 0 else [])
            message, descriptors = await self._receive()
        except OSError as error:
            raise await self._ended() from error
        if not message:
            raise await self._ended()
        try:
            return _checked(task, _REPLY.decode(message), descriptors)
        except (msgspec.MsgspecError, ValueError, OSError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise MediaError(MediaCode.DECODER_FAILED, _FAILED) from error

    async def kill(self) -> None:
        """End it at once, and wait until the system has forgotten it."""
        self._link.close()
        self._process.kill()
        await asyncio.shield(asyncio.to_thread(self._process.wait))

    async def _receive(self) -> tuple[bytes, list[int]]:
        loop = asyncio.get_running_loop()
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(
                    self._link, MESSAGE_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
                )
                return message, descriptors
            except BlockingIOError:
                ready = loop.create_future()
                loop.add_reader(self._link, _wake, ready)
                try:
                    await ready
                finally:
                    loop.remove_reader(self._link)

    async def _ended(self) -> MediaError:
        """Why it ended. One that only closed its socket gets a second to end."""
        try:
            status = await asyncio.to_thread(self._process.wait, END_S)
        except subprocess.TimeoutExpired:
            status = 0
        if status == -signal.SIGXCPU:
            text = "Decoding the media takes more CPU time than allowed. Send smaller ones."
            return MediaError(MediaCode.DECODE_TIMEOUT, text)
        return MediaError(MediaCode.DECODER_FAILED, _FAILED)


_FAILED: Final = "The media ended the process that decoded them. The file is probably malformed."


def _spawn(program: Sequence[str], child_socket: socket.socket) -> "subprocess.Popen[bytes]":
    """Start the process. Runs in a thread, so the event loop does not wait for the system to create it."""
    inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    with child_socket:
        return subprocess.Popen(
            [sys.executable, "-P", *program, str(child_socket.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=True,
            pass_fds=(child_socket.fileno(),),
            env=inherited | SINGLE_THREADED,
            cwd="/",
            start_new_session=True,  # signals of a terminal are for the edge
        )


def _discard(spawning: "asyncio.Future[subprocess.Popen[bytes]]") -> None:
    """End a process whose starter was cancelled."""
    if not spawning.cancelled() and spawning.exception() is None:
        process = spawning.result()
        process.kill()
        asyncio.get_running_loop().run_in_executor(None, process.wait)


def _wake(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _checked(task: DecodeTask, reply: Reply, descriptors: list[int]) -> TaskReply:
    """A reply to this task. Memory that the process could still change is not accepted. Raises `ValueError`."""
    if reply.number != task.number:
        raise ValueError("a reply to another task")
    if isinstance(reply, Rejected):
        if descriptors:
            raise ValueError("a rejection with a descriptor")
        return TaskReply(reply, -1)
    if len(descriptors) != 1 or fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ValueError("the decoded item is not sealed")
    size = byte_count(reply.media.dtype, reply.media.shape)
    if os.fstat(descriptors[0]).st_size != size:
        raise ValueError("the decoded item is not of the size stated")
    return TaskReply(reply, descriptors[0])


Line = Literal["fetch", "decode"]
"""Items to be fetched from a server, and items that their requests contain."""

_FULL: Final = "Too many requests with media at the moment. Retry."
_LATE: Final = "The media waited too long for a process. Retry."


class WaitingLine:
    """Items of one line by tenant. Tenants take turns, and each one's items keep their order."""

    def __init__(self, items_max: int) -> None:
        self._items_max = items_max
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def __len__(self) -> int:
        """Items that wait."""
        return sum(map(len, self._waiting.values()))

    def add(self, tenant: str) -> "asyncio.Future[None]":
        """Wait: the future is done when the item has a place.

        A full line is shared: the newest item of the tenant with most of them gives way to one with fewer. Raises `MediaError` if that
        would be this tenant itself.
        """
        if len(self) >= self._items_max:
            most = max(self._waiting, key=lambda name: len(self._waiting[name]), default=tenant)
            if len(self._waiting.get(most, ())) <= len(self._waiting.get(tenant, ())) + 1:
                raise MediaError(MediaCode.BUSY, _FULL)
            self._waiting[most].pop().set_exception(MediaError(MediaCode.BUSY, _FULL))
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(future)
        return future

    def pop(self) -> "asyncio.Future[None] | None":
        """The item whose turn it is, removed; its tenant is the last one then. None if none waits."""
        while self._waiting:
            tenant, items = self._waiting.popitem(last=False)
            future = items.popleft() if items else None
            if items:
                self._waiting[tenant] = items
            if future is not None and not future.done():
                return future
        return None

    def remove(self, tenant: str, future: "asyncio.Future[None]") -> None:
        """Wait no longer."""
        items = self._waiting.get(tenant)
        if items is not None and future in items:
            items.remove(future)
            if not items:
                del self._waiting[tenant]


class ProcessPlaces:
    """Places in the decoding processes: `places` items have one at a time, and at most `places` - 1 (but at least one) of these are fetched.

    So a server that sends slowly keeps no place from all items that came with their requests. The lines take turns at free places. An
    item waits at most `wait_s`, and a line has at most `waiting_max` items.
    """

    def __init__(self, places: int, waiting_max: int, wait_s: float) -> None:
        self._free = places
        self._free_for_fetching = max(1, places - 1)
        self._wait_s = wait_s
        self._lines: OrderedDict[Line, WaitingLine] = OrderedDict(
            fetch=WaitingLine(waiting_max), decode=WaitingLine(waiting_max)
        )

    @asynccontextmanager
    async def place(self, line: Line, tenant: str) -> AsyncIterator[None]:
        """A place for one item. Raises `MediaError` if too many wait, or for too long."""
        if self._has_place(line) and not len(self._lines[line]):
            self._take(line)
        else:
            await self._wait(line, tenant)
        try:
            yield
        finally:
            self._give_back(line)

    async def _wait(self, line: Line, tenant: str) -> None:
        future = self._lines[line].add(tenant)
        try:
            async with asyncio.timeout(self._wait_s):
                await future
        except BaseException as error:
            self._lines[line].remove(tenant, future)
            if future.done() and not future.cancelled() and future.exception() is None:
                # It got its place at the moment at which it was cancelled.
                self._give_back(line)
            if isinstance(error, TimeoutError):
                raise MediaError(MediaCode.BUSY, _LATE) from error
            raise

    def _has_place(self, line: Line) -> bool:
        return self._free > 0 and (line == "decode" or self._free_for_fetching > 0)

    def _take(self, line: Line) -> None:
        self._free -= 1
        self._free_for_fetching -= line == "fetch"

    def _give_back(self, line: Line) -> None:
        self._free += 1
        self._free_for_fetching += line == "fetch"
        while (chosen := self._next()) is not None:
            next_line, future = chosen
            self._take(next_line)
            self._lines.move_to_end(next_line)
            future.set_result(None)

    def _next(self) -> "tuple[Line, asyncio.Future[None]] | None":
        """Return whose turn it is, of those that may have a place; None if there is none."""
        for line, waiting in self._lines.items():
            if self._has_place(line) and (future := waiting.pop()) is not None:
                return line, future
        return None


# The intake.

PIECE_BYTES: Final = 256 << 10
"""Characters of a text that are encoded at a time: other threads run in between."""

START_S: Final = 20.0
"""The longest time that a process may take to start, on a busy machine."""

WALL_PER_CPU: Final = 4
"""How much longer than its CPU time an item may take on a busy machine."""

RETRY_AFTER_S: Final = 1.0

_TOO_SLOW: Final = "Fetching and decoding the media took too long. Send smaller ones."

P = ParamSpec("P")
T = TypeVar("T")

_log = structlog.get_logger("headwater.media")

DEFAULT_POLICY: Final = FetchPolicy()
DEFAULT_SETTINGS: Final = IntakeSettings()
DEFAULT_LIMITS: Final = MediaLimits()
DEFAULT_TARGET: Final = MediaTarget()


class MediaFetcher(Protocol):
    """Turns what clients name into items: the intake, or the intake for one tenant."""

    @property
    def limits(self) -> MediaLimits:
        """The limits of items that have none of their own."""
        ...

    async def fetch(
        self, source: MediaSource, limits: MediaLimits | None = None, target: MediaTarget = DEFAULT_TARGET
    ) -> MediaItem:
        """See `MediaIntake.fetch`."""
        ...


class MediaIntake:
    """The processes of one edge. They are started when needed and kept; `close` ends them.

    `limits` hold for items without limits of their own. `idle` are processes without an item, `pids` those of all. Raises
    `ValueError` for a policy that says nothing sensible.
    """

    def __init__(
        self,
        policy: FetchPolicy = DEFAULT_POLICY,
        settings: IntakeSettings = DEFAULT_SETTINGS,
        limits: MediaLimits = DEFAULT_LIMITS,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        check_policy(policy)
        self.limits = limits
        self._settings = settings
        self._policy = policy
        self._setup = ProcessSetup(policy, settings.memory_mib << 20)
        self._program = program
        self._budget = MemoryBudget(settings.decoded_mib << 20)
        self._places = ProcessPlaces(settings.processes, settings.queue_max, settings.queue_s)
        self.idle: list[IntakeProcess] = []
        self.pids: set[int] = set()
        self._number = 0
        self._closed = False

    async def fetch(
        self,
        source: MediaSource,
        limits: MediaLimits | None = None,
        target: MediaTarget = DEFAULT_TARGET,
        tenant: str = "",
    ) -> MediaItem:
        """The checked, decoded item that a client named, in its tenant's turn.

        Raises `ApiError`: 400 with a `MediaCode` if the item is rejected, 503 if too many wait, or if it waited too long. If
        cancelled, the work on it stops.
        """
        try:
            return await self._fetch(source, limits or self.limits, target, tenant)
        except MediaError as error:
            raise _api_error(error, source.param) from error

    async def close(self) -> None:
        """End all processes. Items that are being decoded end with their callers."""
        self._closed = True
        while self.idle:
            await self._end(self.idle.pop())

    async def _fetch(
        self, source: MediaSource, limits: MediaLimits, target: MediaTarget, tenant: str
    ) -> MediaItem:
        kind_limits = getattr(limits, source.kind)
        self._check(source, target, kind_limits.bytes_max)
        self._number += 1
        is_url = source.encoding == "url"
        url = source.content if is_url and isinstance(source.content, str) else ""
        task = DecodeTask(
            self._number, source.kind, source.encoding, url, limits, target._replace(processor="")
        )
        seconds = START_S + kind_limits.fetch_s + WALL_PER_CPU * kind_limits.decode_s
        place = self._places.place("fetch" if is_url else "decode", tenant)
        async with place, AsyncExitStack() as open_until_done:
            content = -1
            if not is_url:
                content = os.memfd_create("content", os.MFD_CLOEXEC)
                open_until_done.push_async_callback(_in_thread, os.close, content)
                await _in_thread(_write, content, source.content)
            reply, descriptor = await self._run(task, content, seconds)
            if isinstance(reply, Rejected):
                raise MediaError(reply.code, reply.message)
            open_until_done.push_async_callback(_in_thread, os.close, descriptor)
            return await _in_thread(self._item, source.kind, target.processor, reply.media, descriptor)

    def _check(self, source: MediaSource, target: MediaTarget, bytes_max: int) -> None:
        """What needs no process. Raises `MediaError`."""
        if source.kind == "embedding" and target.embedding is None:
            raise MediaError(MediaCode.EMBEDDINGS_OFF, "Precomputed embeddings are not accepted here.")
        if source.encoding == "url":
            text = source.content
            if not isinstance(text, str) or len(text) > URL_CHARS_MAX or not _is_unicode(text):
                raise MediaError(
                    MediaCode.BAD_URL,
                    f"The URL of the media is invalid, or has more than {URL_CHARS_MAX} characters.",
                )
        elif len(source.content) > encoded_bytes_max(source.encoding, bytes_max):
            raise MediaError(MediaCode.TOO_LARGE, f"The file of the media has more than {bytes_max} bytes.")

    async def _run(self, task: DecodeTask, content: int, seconds: float) -> TaskReply:
        """The reply of a process to a task. One that does not reply in order is ended. Raises `MediaError`."""
        process = self.idle.pop() if self.idle else await IntakeProcess.start(self._setup, self._program)
        self.pids.add(process.pid)
        is_usable = False
        try:
            try:
                async with asyncio.timeout(seconds):
                    done = await process.run(task, content)
            except TimeoutError as error:
                raise MediaError(MediaCode.DECODE_TIMEOUT, _TOO_SLOW) from error
            is_usable = not (isinstance(done.reply, Rejected) and done.reply.final) and not self._closed
            return done
        except MediaError as error:
            _log.warning("media_process_ended", kind=task.kind, code=error.code.value, pid=process.pid)
            raise
        finally:
            if is_usable:
                self.idle.append(process)
            else:
                await self._end(process)

    def _item(self, kind: MediaKind, processor: str, media: DecodedMedia, descriptor: int) -> MediaItem:
        """The item behind a sealed descriptor, with its id. Raises `MediaError` if too many others are in use."""
        size = byte_count(media.dtype, media.shape)
        if not self._budget.take(size):
            raise MediaError(MediaCode.BUSY, "The requests in flight hold too many media. Retry.")
        try:
            data = map_values(descriptor, size, self._budget)
        except OSError as error:
            self._budget.give_back(size)
            raise MediaError(MediaCode.BUSY, "The edge has no memory for more media. Retry.") from error
        if kind == "file" and media.format in IMAGE_FORMATS:
            kind = "image"
        if media.grid:
            processor = f"{processor} grid {media.grid}"
        id_ = media_id(kind, media.dtype, media.shape, data, processor)
        return MediaItem(kind, id_, data=data, **media._asdict())

    async def _end(self, process: IntakeProcess) -> None:
        self.pids.discard(process.pid)
        await process.kill()


class TenantIntake(NamedTuple):
    """The intake for the items of one tenant. See `MediaFetcher`."""

    intake: MediaIntake
    tenant: str

    @property
    def limits(self) -> MediaLimits:
        """See `MediaFetcher.limits`."""
        return self.intake.limits

    async def fetch(
        self, source: MediaSource, limits: MediaLimits | None = None, target: MediaTarget = DEFAULT_TARGET
    ) -> MediaItem:
        """See `MediaFetcher.fetch`."""
        return await self.intake.fetch(source, limits, target, self.tenant)


def check_policy(policy: FetchPolicy) -> None:
    """Raises `ValueError` for networks and folders that are none, and for more hosts than a process can be given."""
    for text in policy.networks:
        ip_network(text)
    for folder in policy.directories:
        if not os.path.isabs(folder) or os.path.normpath(folder) != folder:
            raise ValueError(f"{folder!r} is no absolute path: folders of media are written as /srv/media")
    if len(msgspec.msgpack.encode(ProcessSetup(policy, 0))) > MESSAGE_BYTES_MAX:
        raise ValueError("the list of hosts of media is too long; use `*.example` for all names below one")


async def _in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run in a thread. If cancelled, wait for it first: it uses descriptors that the caller closes.

    The last close of shared memory frees its pages, which takes milliseconds too.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _write(descriptor: int, content: str | bytes | memoryview) -> None:
    """Write a content to shared memory, a text in pieces."""
    if isinstance(content, str):
        for at in range(0, len(content), PIECE_BYTES):
            _write(descriptor, content[at : at + PIECE_BYTES].encode("utf-8", "replace"))
        return
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _is_unicode(text: str) -> bool:
    """Return whether the text has no lone surrogates, which JSON can spell and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _api_error(error: MediaError, param: str | None) -> ApiError:
    if error.code == MediaCode.BUSY:
        return ApiError(
            503,
            str(error),
            kind="server_error",
            param=param,
            code=error.code.value,
            retry_after_s=RETRY_AFTER_S,
        )
    if error.code == MediaCode.UNAVAILABLE:
        return ApiError(
            503, str(error), kind="server_error", param=param, code=error.code.value, headers=NO_RETRY
        )
    return ApiError(400, str(error), param=param, code=error.code.value)
