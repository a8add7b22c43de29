"""One intake process, seen from the event loop that uses it: it takes a task, and gives a reply or ends."""

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from headwater.actors.media.item import byte_count
from headwater.actors.media.request import (
    MESSAGE_BYTES_MAX,
    SEALS,
    DecodeTask,
    MediaCode,
    MediaError,
    ProcessSetup,
    Rejected,
    Reply,
)

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
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        spawning = asyncio.ensure_future(asyncio.to_thread(_spawn, program, theirs))
        try:
            process = await asyncio.shield(spawning)
        except BaseException:
            ours.close()
            spawning.add_done_callback(_discard)
            raise
        started = cls(process, ours)
        ours.send(msgspec.msgpack.encode(setup))
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


def _spawn(program: Sequence[str], theirs: socket.socket) -> "subprocess.Popen[bytes]":
    """Start the process. Runs in a thread, so the event loop does not wait for the system to create it."""
    inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-P", *program, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=True,
            pass_fds=(theirs.fileno(),),
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
    size = byte_count(reply.dtype, reply.shape)
    if os.fstat(descriptors[0]).st_size != size:
        raise ValueError("the decoded item is not of the size stated")
    return TaskReply(reply, descriptors[0])
