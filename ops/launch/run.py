"""`headwater launch`: run a fleet's file, all of it or one host's part."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from headwater.engines import logs, registry
from headwater.ops.config.processes import LogSettings, process_words
from headwater.ops.config.setting import ConfigError
from headwater.ops.launch import hosts, ssh, up
from headwater.ops.launch.fleet_file import LOCAL, FleetFile, parse_fleet, read_fleet, with_addresses
from headwater.ops.start import engine_process, plan, signals
from headwater.ops.start.machine import MachinePlan
from headwater.ops.start.spawner import Main

FILE_BYTES_MAX: Final = 1 << 20


def launch(path: str, host: str, addresses: Sequence[str], *, from_stdin: bool, main: Main) -> int:
    """Run the fleet of a file until stopped: one host's part, or all hosts' over ssh. `main` runs a command line.

    `addresses` are those of hosts in place of the file's, as NAME=ADDRESS. Raises `ConfigError`.
    """
    if from_stdin and (path or not host):
        raise ConfigError("--stdin is for a host that another one starts: give --host NAME and no FILE")
    if not from_stdin and not path:
        raise ConfigError("give the fleet's file: headwater launch fleet.toml")
    text = _read_stdin() if from_stdin else ""
    fleet = parse_fleet(text, "fleet") if from_stdin else read_fleet(Path(path))
    fleet = with_addresses(fleet, addresses)
    if host or not fleet.hosts:
        return _run_here(fleet, host or LOCAL, from_stdin=from_stdin, main=main)
    if addresses:
        raise ConfigError(
            "--address is for one host's part: give --host, or write the addresses into the file"
        )
    text = Path(path).read_bytes().decode("utf-8-sig")
    for name in fleet.host_names:
        ssh.command_for(fleet, name)
    shared = hosts.shared_settings(fleet)
    _configure_logs(shared.log)
    return signals.run(lambda stop: ssh.launch(fleet, text, stop, shared.drain_timeout))


def _run_here(fleet: FleetFile, host: str, *, from_stdin: bool, main: Main) -> int:
    machine_plan = hosts.plan_host(fleet, host)
    _configure_logs(machine_plan.log)
    _check_environment(machine_plan)
    spawner = up.start_spawner(main)

    async def run(stop: asyncio.Event) -> int:
        controller = Controller(stop) if from_stdin else None
        if controller is not None:
            await controller.connect()
        return await up.up(machine_plan, stop, spawner, controller)

    return signals.run(run)


def _configure_logs(log: LogSettings) -> None:
    logs.configure(log.level, log.format, kind="launch")


def _check_environment(machine_plan: MachinePlan) -> None:
    """Check that this Python has the engines that a whole fleet runs in: only those with a process per worker may be elsewhere. Raises `ConfigError`."""
    for engines in (*machine_plan.engines, *machine_plan.followers):
        engine = engines.worker.engine
        needs = registry.traits_of(engine).environment
        if needs is None or needs.per_worker or engine_process.has(engine):
            continue
        raise ConfigError(
            f"the engine {engine} is not installed for {sys.executable} on {socket.gethostname()}: run `headwater launch` with the "
            "Python of an environment that has it (hosts.NAME.command)"
        )


def _read_stdin() -> str:
    """The fleet's file from standard input: its length, then its text. Raises `ConfigError`.

    Read without buffering: what follows is the end, which stops the host.
    """
    head = b""
    while not head.endswith(b"\n") and len(head) < 20:
        byte = os.read(0, 1)
        if not byte:
            break
        head += byte
    if not head.strip().isdigit() or int(head) > FILE_BYTES_MAX:
        raise ConfigError("--stdin: expected the length of the fleet's file in bytes, then the file")
    data = b""
    while len(data) < int(head):
        part = os.read(0, int(head) - len(data))
        if not part:
            raise ConfigError("--stdin: ended before the fleet's file did")
        data += part
    return data.decode()


class Controller(asyncio.Protocol):
    """The `headwater launch` that started this host, at the other ends of standard input and output.

    A line from it, or the end of standard input, stops this host's processes; the NATS server follows when all hosts have
    got so far, which the end of standard input says: a cluster that loses its majority would keep the others from ending in order.
    """

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._ended = asyncio.Event()

    async def connect(self) -> None:
        """Read standard input."""
        standard_input = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 (the transport closes it)
        await asyncio.get_running_loop().connect_read_pipe(lambda: self, standard_input)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._stop.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop.set()
        self._ended.set()

    def tell_ready(self) -> None:
        """See `Starter`."""
        print(ssh.READY, flush=True)

    async def wait_for_others(self) -> None:
        """See `Starter`."""
        with contextlib.suppress(OSError):
            print(ssh.STOPPED, flush=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ssh.STOP_S):
                await self._ended.wait()


def describe(fleet: FleetFile) -> str:
    """Every process of a fleet by host, as its command line; references stay out."""
    lines = []
    for name in fleet.host_names:
        host = fleet.host(name)
        lines.append(f"{name} ({host.address}{', ssh ' + host.ssh if host.ssh else ''})")
        if name in fleet.nats_hosts:
            lines.append(f"  nats-server on port {fleet.nats.port}")
        lines += [f"  headwater {' '.join(words)}" for words in commands_of(fleet, name)]
    return "\n".join(lines)


def commands_of(fleet: FleetFile, host: str) -> list[list[str]]:
    """The command lines of a host's processes, without references."""
    machine_plan = hosts.plan_host(fleet, host, remote=True)
    commands = [["router", *process_words(process)] for process in machine_plan.routers]
    commands += [["edge", *process_words(process)] for process in machine_plan.edges]
    commands += [[kind, *process_words(process)] for kind, process in machine_plan.singles]
    for engines in (*machine_plan.engines, *machine_plan.followers):
        process_settings, after = plan.apart(engines)
        commands.append(["engine", *process_words(process_settings), *after])
    return commands
