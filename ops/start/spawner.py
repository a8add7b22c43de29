"""The spawner: it starts `headwater` processes by fork from one that has imported everything.

A Headwater process needs about 1.5 s of CPU to import its modules and load its compiled kernels. `headwater up` pays for
that once: before it starts an event loop or a thread it forks a spawner, which does nothing but fork again. Processes
forked from it share those modules' memory and are ready in a tenth of the time.

It serves only processes that use no GPU and no engine library: those read their environment when they are imported.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import msgspec
import setproctitle

from headwater.engines.process import freeze_heap
from headwater.ops.start.signals import die_with_parent, replace_handlers

MESSAGE_BYTES = 1 << 17
"""Most that a request may have: Linux limits a command line and environment to about as much."""

Main = Callable[[Sequence[str]], int]
"""Runs a command line, without the program's name; returns the exit code."""


class _Request(msgspec.Struct, array_like=True):
    arguments: list[bytes]
    environ: dict[bytes, bytes]
    """Bytes, as the system has them: they need not be valid in any encoding."""


class _Reply(msgspec.Struct, array_like=True):
    """A process was started (`exit_code` is None) or has ended."""

    pid: int
    exit_code: int | None = None


_encode = msgspec.msgpack.encode
_requests = msgspec.msgpack.Decoder(_Request)
_replies = msgspec.msgpack.Decoder(_Reply)


class SpawnerLost(Exception):
    """The spawner died; the kernel killed what it had started."""


class SpawnedProcess:
    """A process that the spawner started. Has the interface of `asyncio.subprocess.Process` that `Child` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        """Wait for the end; returns the exit code, or minus the signal's number."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Raises `ProcessLookupError` once it has ended: its id may be another's."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    def end(self, code: int) -> None:
        """Record its exit code and wake those who wait."""
        self.returncode = code
        self._ended.set()


class Spawner:
    """The other side of `serve`: requests processes and learns of their ends. For one event loop."""

    def __init__(self, connection: socket.socket, pid: int = 0) -> None:
        """`pid`: the process that serves `connection`, if it is a child of this one."""
        connection.setblocking(False)
        self.pid = pid
        self._socket = connection
        self._starting: list[asyncio.Future[SpawnedProcess]] = []
        self._running: dict[int, SpawnedProcess] = {}
        self._reading = False

    @classmethod
    def fork(cls, main: Main) -> "Spawner":
        """Fork a process that serves. Call it before the first thread or event loop."""
        parent_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Shared pages stay shared while no collection writes to them.
        freeze_heap()
        pid = os.fork()
        if not pid:
            parent_socket.close()
            serve(child_socket, main)
        child_socket.close()
        return cls(parent_socket, pid)

    async def spawn(
        self, arguments: Sequence[str], environ: Mapping[str, str], output: Sequence[int] = ()
    ) -> SpawnedProcess:
        """Start `headwater ARGUMENTS` with exactly this environment. Raises `SpawnerLost`.

        `output` are the file descriptors of its standard output and error; without, they are those of this process.
        """
        loop = asyncio.get_running_loop()
        if not self._reading:
            loop.add_reader(self._socket, self._on_readable)
            self._reading = True
        started: asyncio.Future[SpawnedProcess] = loop.create_future()
        self._starting.append(started)
        try:
            pairs = {os.fsencode(name): os.fsencode(text) for name, text in environ.items()}
            request = _encode(_Request([os.fsencode(word) for word in arguments], pairs))
            socket.send_fds(self._socket, [request], list(output))
        except OSError as error:
            self._starting.remove(started)
            raise SpawnerLost("the process that starts the others has ended") from error
        return await started

    def close(self) -> None:
        """End the spawner. What it started and still runs is killed by the kernel."""
        if self._reading:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._reading = False
        self._socket.close()
        if self.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def _on_readable(self) -> None:
        while True:
            try:
                data = self._socket.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._on_lost()
                return
            reply = _replies.decode(data)
            if reply.exit_code is None:
                process = self._running[reply.pid] = SpawnedProcess(reply.pid)
                started = self._starting.pop(0)
                if not started.done():
                    started.set_result(process)
            else:
                self._running.pop(reply.pid).end(reply.exit_code)

    def _on_lost(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._reading = False
        for started in self._starting:
            if not started.done():
                started.set_exception(SpawnerLost("the process that starts the others has ended"))
        self._starting.clear()
        for process in self._running.values():
            # The kernel kills them with their parent; no exit code will follow.
            process.end(-signal.SIGKILL)
        self._running.clear()


def serve(requests: socket.socket, main: Main) -> NoReturn:
    """Fork what is requested and report what ended, until the other side is closed. Ends the process."""
    # A session of its own: Ctrl-C is for the parent, which ends the others in order.
    os.setsid()
    die_with_parent()
    setproctitle.setproctitle("headwater spawner")
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    replace_handlers(lambda *_: None)
    try:
        while True:
            ready, _, _ = select.select([requests.fileno(), wake_read], [], [])
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            if requests.fileno() in ready:
                data, output, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 2)
                if not data:
                    os._exit(0)
                request = _requests.decode(data)
                spawner = os.getpid()
                pid = os.fork()
                if not pid:
                    for end in (wake_read, wake_write):
                        os.close(end)
                    requests.close()
                    _run_command(request, output, main, spawner)
                for end in output:
                    os.close(end)
                requests.sendall(_encode(_Reply(pid)))
            _report_ended(requests)
    except OSError:
        # The parent died.
        os._exit(1)


def _report_ended(replies: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        replies.sendall(_encode(_Reply(pid, os.waitstatus_to_exitcode(status))))


def _run_command(request: _Request, output: Sequence[int], main: Main, spawner: int) -> NoReturn:
    """Become the requested process: own session, signals, environment, name; then run it."""
    code = 1
    try:
        os.setsid()
        die_with_parent()
        if os.getppid() != spawner:
            # It died before the line above took effect.
            os._exit(1)
        signal.set_wakeup_fd(-1)
        replace_handlers(signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        null = os.open(os.devnull, os.O_RDONLY)
        for number, end in enumerate((null, *output)):
            os.dup2(end, number)
            os.close(end)
        # Nothing that the parent has buffered is printed twice.
        sys.stdout, sys.stderr = (
            open(number, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
            for number in (1, 2)
        )
        os.environb.clear()
        os.environb.update(request.environ)
        arguments = [os.fsdecode(word) for word in request.arguments]
        sys.argv = ["headwater", *arguments]
        setproctitle.setproctitle(" ".join(sys.argv))
        code = main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: the exit handlers are those of the process that was forked.
        os._exit(code)
