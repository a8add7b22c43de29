"""Child processes of `headwater up`. The kernel ends them with their parent.

A worker that fails again and again is started again as long as another worker runs steadily, or once the whole fleet was
ready: what clients send must not end it. Any other process that cannot be kept alive is the fleet's failure.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from headwater.actors.runtime.actor import (
    RestartLimitReached,
    RestartPolicy,
    StartFailed,
    Unrecoverable,
    supervise,
)
from headwater.engines import logs
from headwater.ops.config.setting import ENV_PREFIX
from headwater.ops.config.sources import CONFIG_VARIABLE, KEY_VARIABLE, OWN, is_of_a_service
from headwater.ops.start.actor import EXIT_START_FAILED, EXIT_UNRECOVERABLE
from headwater.ops.start.signals import die_with_parent
from headwater.ops.start.spawner import SpawnedProcess, Spawner
from headwater.schemas.clock import Clock, SystemClock

STOP_TIMEOUT_S = 25.0
"""Time between SIGTERM and SIGKILL of a process that drains nothing."""

_log = structlog.get_logger("headwater.up")

OnExit = Callable[[int], Awaitable[None]]


def child_environment() -> dict[str, str]:
    """This process's environment, with bytecode caching on: engines import some 5,000 modules.

    Without settings: those of a fleet are not those of its processes, which get theirs as flags. The fleet's own
    process has reported what looks like one.
    """
    environ = {name: text for name, text in os.environ.items() if not _is_setting(name, text)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    environ["PYTHONUNBUFFERED"] = "1"
    return environ


def _is_setting(variable: str, text: str) -> bool:
    if not variable.startswith(ENV_PREFIX) or is_of_a_service(variable, text):
        return False
    return variable in (CONFIG_VARIABLE, KEY_VARIABLE) or variable not in OWN


def headwater_command(*arguments: str) -> list[str]:
    """Command line of another headwater process."""
    return [sys.executable, "-m", "headwater.ops.cli", *arguments]


LINE_MAX: Final = 1 << 20
"""Bytes of a line; a longer one is passed on in parts."""

REST_S: Final = 1.0
"""How long to wait for the end of a dead process's output, which a process of another group may hold open."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class OutputLines(asyncio.Protocol):
    """Passes on what a child writes to `stream`, line by line: a log line as it is, any other as a log line with its text.

    Native libraries, and Python before it logs, write text.
    """

    def __init__(self, stream: str, kind: str, child: str) -> None:
        self.pid = 0
        self.ended = asyncio.Event()
        self._stream = stream
        self._kind = kind
        self._child = child
        self._rest = b""

    async def open(self) -> int:
        """Read from a new pipe until all that have its other end closed it; returns that end."""
        read_end, write_end = os.pipe()
        await asyncio.get_running_loop().connect_read_pipe(lambda: self, open(read_end, "rb", buffering=0))  # noqa: SIM115 (the transport closes it)
        return write_end

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_MAX:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._pass_on(line)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._pass_on(self._rest)
        self.ended.set()

    def _pass_on(self, line: bytes) -> None:
        if logs.is_line(line):
            sys.stderr.write(f"{line.decode()}\n")
            sys.stderr.flush()
            return
        # A progress bar repeats itself in one line.
        text = _COLOUR.sub("", line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]).rstrip()
        if text:
            logs.write_text(text, self._stream, kind=self._kind, child=self._child, pid=self.pid)


class Child:
    """One supervised process. `run` is for `supervise`; `stop` ends it for good.

    With `wraps`, the kind of the process, what it writes becomes log lines of this one: see `OutputLines`.
    One that `may_end` is not started again when it ends with exit code 0. With a `spawner`, `command` is a `headwater`
    command without the program's name, and the process is forked from the spawner instead of executed.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        on_exit: OnExit | None = None,
        log_file: str = "",
        environ: dict[str, str] | None = None,
        may_end: bool = False,
        spawner: Spawner | None = None,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        wraps: str = "",
    ) -> None:
        self.name = name
        self._wraps = wraps
        self._command = command
        self._on_exit = on_exit
        self._log_file = log_file
        self._environ = environ or {}
        self._may_end = may_end
        self._spawner = spawner
        self._stop_timeout_s = stop_timeout_s
        self._process: asyncio.subprocess.Process | SpawnedProcess | None = None
        self._output: list[OutputLines] = []
        self._stopping = False
        self._started_s = 0.0

    @property
    def pid(self) -> int:
        """Process id; 0 while it is not running."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    @property
    def runs_for_s(self) -> float:
        """Seconds since its process was started; 0 while it is not running."""
        return time.monotonic() - self._started_s if self.pid else 0.0

    async def run(self) -> str:
        """Start the process and wait for its end. Empty when it was stopped."""
        if self._stopping:
            return ""
        self._started_s = time.monotonic()
        process = self._process = await self._start()
        _log.debug("child_started", child=self.name, pid=process.pid)
        code = await process.wait()
        # Whatever it had started itself goes with it.
        _kill_group(process.pid)
        await self._pass_on_rest()
        if self._on_exit is not None:
            await self._on_exit(process.pid)
        if self._stopping or (self._may_end and code == 0):
            return ""
        if code == EXIT_UNRECOVERABLE:
            raise Unrecoverable("it cannot start; its log has the reason")
        if code == EXIT_START_FAILED:
            raise StartFailed("it did not start; its log has the reason")
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def _start(self) -> asyncio.subprocess.Process | SpawnedProcess:
        environ = child_environment() | self._environ
        streams = ("stdout", "stderr") if self._wraps else ()
        self._output = [OutputLines(stream, self._wraps, self.name) for stream in streams]
        ends = [await lines.open() for lines in self._output]
        try:
            if self._log_file:
                ends.append(os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
            process = await self._start_with(environ, ends)
        finally:
            for end in ends:
                os.close(end)
        for lines in self._output:
            lines.pid = process.pid
        return process

    async def _start_with(
        self, environ: dict[str, str], ends: list[int]
    ) -> asyncio.subprocess.Process | SpawnedProcess:
        """Start it with `ends` as its output and error; one is for both, and without it has those of this process."""
        if self._spawner is not None:
            return await self._spawner.spawn(self._command, environ, ends)
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=ends[0] if ends else None,
            stderr=ends[-1] if ends else None,
            env=environ,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    async def restart(self) -> None:
        """Ask it to end, then make it: who supervises it starts it again."""
        if not self._stopping:
            await self._end()

    async def stop(self) -> None:
        """Ask it to end, then make it."""
        self._stopping = True
        await self._end()
        await self._pass_on_rest()

    async def _pass_on_rest(self) -> None:
        """Wait until what it wrote before its end is passed on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                for lines in self._output:
                    await lines.ended.wait()

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            process.send_signal(signal.SIGTERM)
        except ProcessLookupError:
            return
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                await process.wait()
        except TimeoutError:
            _log.warning("child_killed", child=self.name, after_s=self._stop_timeout_s)
            _kill_group(process.pid)
            await process.wait()


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


# The processes of a fleet, each supervised, and stopped in stages.

POLICY = RestartPolicy()


class ChildGroup:
    """The processes of a fleet. `failure` is set to the reason once the fleet cannot continue; `was_ready` is set by its owner."""

    def __init__(self, clock: Clock | None = None, policy: RestartPolicy = POLICY) -> None:
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.was_ready = False
        self._clock = clock or SystemClock()
        self._policy = policy
        self._children: list[tuple[Child, asyncio.Task[None]]] = []
        self._workers: dict[str, Child] = {}
        """The workers that are not given up."""

    def add(self, child: Child, *, is_worker: bool = False) -> None:
        """Start a process, and start it again whenever it fails."""
        if is_worker:
            self._workers[child.name] = child
        task = asyncio.create_task(self._watch(child, is_worker=is_worker), name=child.name)
        self._children.append((child, task))

    def pid(self, name: str) -> int:
        """Process id of a child, 0 while it is down."""
        return next(child.pid for child, _ in self._children if child.name == name)

    async def stop(self, *names: str) -> None:
        """End these processes at the same time; without names, all that are left."""
        group = [pair for pair in self._children if not names or pair[0].name in names]
        self._children = [pair for pair in self._children if pair not in group]
        await asyncio.gather(*(child.stop() for child, _ in group))
        for _, task in group:
            task.cancel()
        await asyncio.gather(*(task for _, task in group), return_exceptions=True)

    async def stop_workers(self) -> None:
        """End every process of a worker at the same time."""
        await self.stop(*(child.name for child, _ in self._children if child.name in self._workers))

    async def _watch(self, child: Child, *, is_worker: bool) -> None:
        def is_kept() -> bool:
            return is_worker and (self.was_ready or self._has_steady_worker())

        try:
            await supervise(child.name, child.run, self._clock, self._policy, is_kept=is_kept)
        except RestartLimitReached as error:
            self._workers.pop(child.name, None)
            if is_worker and self.was_ready and self._workers:
                _log.error("process_abandoned", child=child.name, reason=str(error))
            elif not self.failure.done():
                self.failure.set_result(str(error))

    def _has_steady_worker(self) -> bool:
        return any(child.runs_for_s >= self._policy.steady_s for child in self._workers.values())
