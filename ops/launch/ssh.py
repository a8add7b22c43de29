"""A fleet on several hosts, from one terminal: one ssh per host, which runs that host's part and ends with the connection.

    headwater launch fleet.toml ─┬─ ssh ops@a  headwater launch --host a --stdin
                                 └─ ssh ops@b  headwater launch --host b --stdin

The file goes through standard input: its length in bytes as a line, then the file. Another line stops the host's processes, and the
end of standard input, which also a lost connection is, its NATS server, too. What a host writes appears here behind its name.
"""

import asyncio
import contextlib
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Final

import structlog

from headwater.engines import logs
from headwater.ops.config.setting import ConfigError
from headwater.ops.launch.fleet_file import FleetFile

OPTIONS: Final = (
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
)
"""No terminal, no questions, and a lost connection is noticed within 15 seconds."""

STOP_S: Final = 90.0
"""How long hosts have to finish their requests before their connections are closed by force, unless drain takes longer."""

READY: Final = "\x1eheadwater-host-ready"
STOPPED: Final = "\x1eheadwater-host-stopped"
"""Lines of a host for who started it: its part is ready; it has stopped but for its NATS server. They begin with a record separator,
which no text does."""

LINE_MAX: Final = 1 << 20

_log = structlog.get_logger("headwater.launch")


class RemoteHost:
    """The part of one host, behind ssh."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.is_ready = asyncio.Event()
        self.has_stopped = asyncio.Event()
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, text: str) -> int:
        """Start it with the fleet's file and pass on what it writes, until it ends; returns its exit code."""
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=LINE_MAX,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        data = text.encode()
        with contextlib.suppress(ConnectionError):
            process.stdin.write(f"{len(data)}\n".encode() + data)
            await process.stdin.drain()
        while line := await self._read_line(process.stdout):
            if line.rstrip() == READY.encode():
                self.is_ready.set()
                continue
            if line.rstrip() == STOPPED.encode():
                self.has_stopped.set()
                continue
            if logs.is_line(line):
                sys.stderr.write(line.decode())
            else:
                sys.stderr.write(f"[{self.name}] {line.decode(errors='replace').rstrip()}\n")
            sys.stderr.flush()
        self.has_stopped.set()
        return await process.wait()

    async def ask_to_stop(self, timeout_s: float) -> None:
        """Ask it to end its processes, and wait until it has, but for its NATS server."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError, TimeoutError):
            process.stdin.write(b"stop\n")
            async with asyncio.timeout(timeout_s):
                await self.has_stopped.wait()

    async def _read_line(self, stream: asyncio.StreamReader) -> bytes:
        try:
            return await stream.readline()
        except ValueError:
            # A line beyond the limit: a part of it is passed on.
            return await stream.read(LINE_MAX) or b"\n"

    async def stop(self, timeout_s: float) -> None:
        """End what is left of it by closing its input; after a time, end the connection."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            _log.warning("host_not_stopped", host=self.name, after_s=timeout_s)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await process.wait()


def command_for(fleet: FleetFile, name: str) -> list[str]:
    """The ssh command of a host. Raises `ConfigError` for a host without `ssh`."""
    host = fleet.host(name)
    if not host.ssh:
        raise ConfigError(
            f"hosts.{name}.ssh: give its destination, or run `headwater launch FILE --host {name}` there yourself"
        )
    remote = f"{host.command} launch --stdin --host {shlex.quote(name)}"
    return ["ssh", *OPTIONS, *shlex.split(host.ssh), remote]


async def launch(fleet: FleetFile, text: str, stop: asyncio.Event, drain_s: float) -> int:
    """Run every host's part until stopped, or until one ends. Exit code 1 if one ended by itself."""
    hosts = [RemoteHost(name, command_for(fleet, name)) for name in fleet.host_names]
    runs = {asyncio.create_task(host.run(text), name=host.name): host for host in hosts}
    stopping = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(_greet(hosts))
    try:
        done, _ = await asyncio.wait({*runs, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping in done:
            return 0
        for task in done - {stopping}:
            host = runs[task]
            logs.say(
                f"host {host.name} ended with exit code {task.result()}: the fleet stops; its lines above have the reason",
                failed=True,
            )
        return 1
    finally:
        ready.cancel()
        stopping.cancel()
        limit_s = max(STOP_S, drain_s + STOP_S)
        # All at once: each host's edges and workers finish what is in flight within the drain timeout. Then the servers.
        await asyncio.gather(*(host.ask_to_stop(limit_s) for host in hosts))
        await asyncio.gather(*(host.stop(STOP_S) for host in hosts))
        await asyncio.gather(*runs, return_exceptions=True)


async def _greet(hosts: Sequence[RemoteHost]) -> None:
    for host in hosts:
        await host.is_ready.wait()
    logs.say(f"the fleet is ready on {len(hosts)} hosts: {', '.join(host.name for host in hosts)}")
