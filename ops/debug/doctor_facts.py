"""The facts that the doctor's checks are about.

Of this machine: disks, ports and who listens on them, key files, and the fleet that `headwater up` runs from a data folder. Of a pool: the
folded state of its log now, and what the latest part of it and of the request log say. What could not be learned is None or empty, and named
among what was skipped.
"""

import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import psutil

from headwater.actors.runtime.ports import Ports
from headwater.events.jetstream.streams import StreamStatus
from headwater.events.ports import Record
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import cache_folder
from headwater.ops.debug.places import open_log, state_at
from headwater.ops.diagnosis import free_bytes
from headwater.ops.history.findings import BEFORE_NS, findings
from headwater.ops.history.findings import Finding as HistoryFinding
from headwater.ops.history.history import FleetAt, Mark, mark_of
from headwater.ops.history.requests import RequestTable
from headwater.ops.nats.server import ServerFacts
from headwater.router.worker import Worker
from headwater.schemas.events import BlocksStored, LoadReported, WorkerJoined
from headwater.schemas.hashing import unpack_hashes
from headwater.schemas.names import is_loopback
from headwater.schemas.routing import Decision
from headwater.schemas.tables import Lease, ModelCard

THIS_MACHINE = "this machine"


class Unreachable(NamedTuple):
    """Why no connection to the server was made. `denied`: it answered, and did not let us in."""

    reason: str
    denied: bool


class ProcessFacts(NamedTuple):
    """What a process said of itself. `data` is None where it did not answer."""

    kind: str
    name: str
    version: str = ""
    data: dict[str, Any] | None = None


class MissingFile(NamedTuple):
    """A file that a model's card names and the object store does not have."""

    pool: str
    model: str
    what: str


class Served(NamedTuple):
    """Prompts that a worker computed blocks of: how many, and of how many it announced the last block."""

    prompts: int = 0
    announced: int = 0


class ClockFacts(NamedTuple):
    """How much later than the writer's own time its messages were stored: the least of `messages` of them, in seconds.

    A clock that is right gives what an append takes; one that is ahead a negative number.
    """

    host: str
    behind_s: float
    messages: int


class PoolFacts(NamedTuple):
    """One pool, from its folded log and the latest part of it. `stored` and `joined` count by worker: messages with stored blocks, incarnations."""

    pool: str
    workers: tuple[Worker, ...] = ()
    cold: frozenset[str] = frozenset()
    clocks: tuple[ClockFacts, ...] = ()
    served: Mapping[str, Served] = {}
    stored: Mapping[str, int] = {}
    joined: Mapping[str, int] = {}
    history: tuple[HistoryFinding, ...] = ()


class Listener(NamedTuple):
    """A listening socket of this machine; `pid` is 0 where another user's process has it."""

    host: str
    port: int
    pid: int
    command: str


class WantedPort(NamedTuple):
    """A port that a fleet on this machine would listen on, and its flag."""

    flag: str
    host: str
    port: int


class LocalFleet(NamedTuple):
    """The fleet of the data folder, while `headwater up` runs it. Ports are those of its NATS server."""

    folder: str
    pid: int
    port: int
    monitor_port: int


class MachineFacts(NamedTuple):
    """What is known of this machine without the fleet. `listeners` is None where the system does not say."""

    host: str = ""
    disks: tuple[tuple[str, int | None], ...] = ()
    listeners: tuple[Listener, ...] | None = None
    engine_sockets: tuple[tuple[str, Listener], ...] = ()
    """Of workers on this machine, by name."""
    wanted_ports: tuple[WantedPort, ...] = ()
    fleet: LocalFleet | None = None
    open_key_files: tuple[str, ...] = ()


class Skipped(NamedTuple):
    """Findings that could not be looked for, and why."""

    findings: tuple[str, ...]
    reason: str


class Facts(NamedTuple):
    """Everything that the checks look at. `keys` is the number of valid API keys, None where we may not read them."""

    url: str
    namespace: str
    version: str
    given_url: bool = True
    unreachable: Unreachable | None = None
    server: ServerFacts | None = None
    other_servers: tuple[ServerFacts, ...] = ()
    streams: tuple[StreamStatus, ...] = ()
    leases: tuple[Lease, ...] | None = None
    cards: tuple[ModelCard, ...] = ()
    missing_files: tuple[MissingFile, ...] = ()
    processes: tuple[ProcessFacts, ...] = ()
    pools: tuple[PoolFacts, ...] = ()
    keys: int | None = None
    own_clock: ClockFacts | None = None
    machine: MachineFacts = MachineFacts()
    engine_log: tuple[str, str] | None = None
    """Its path and the end of its text."""
    skipped: tuple[Skipped, ...] = ()


OTHERS: Final = 0o077
"""Permissions of a file's group and of everyone."""


class Place(NamedTuple):
    """Where a fleet on this machine would be: its folders and the ports that it would listen on."""

    data_dir: Path
    cache_dir: str
    ports: tuple[WantedPort, ...]


def machine_facts(nats: NatsSettings, place: Place, leases: Sequence[Lease]) -> MachineFacts:
    """Everything about this machine. `leases` are those of the namespace, to know our own processes."""
    host = socket.gethostname()
    folders = [place.data_dir]
    if cache := cache_folder(place.cache_dir):
        folders.append(cache)
    listeners = read_listeners()
    sockets = []
    for lease in leases:
        if lease.kind == "worker" and lease.host == host and lease.pid:
            family = _family(lease.pid)
            sockets += [
                (lease.name, listener)
                for listener in listeners or ()
                if listener.pid in family and not is_loopback(listener.host)
            ]
    return MachineFacts(
        host,
        tuple(dict.fromkeys((str(folder), free_bytes(folder)) for folder in folders)),
        listeners,
        tuple(sockets),
        place.ports,
        local_fleet(place.data_dir),
        tuple(open_key_files(nats)),
    )


def local_fleet(folder: Path) -> LocalFleet | None:
    """The fleet that runs from a data folder; None where none does, or where it has no server of its own."""
    try:
        holder = re.search(r"with pid (\d+)", (folder / "lock").read_text())
        config = msgspec.json.decode((folder / "nats" / "nats.conf").read_bytes(), type=dict[str, object])
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError):
        return None
    if holder is None or not Path(f"/proc/{holder[1]}").exists():
        return None
    ports = [str(config.get(key, "")).rpartition(":")[2] for key in ("listen", "http")]
    if not ports[0].isdecimal():
        return None
    return LocalFleet(
        str(folder), int(holder[1]), int(ports[0]), int(ports[1]) if ports[1].isdecimal() else 0
    )


def open_key_files(nats: NatsSettings) -> Iterator[str]:
    """Files of our keys that others of this machine may read."""
    files = [Path(file_name) for file_name in (nats.nkey_file, nats.creds_file, nats.tls_key) if file_name]
    if nats.keys_dir:
        files += sorted(Path(nats.keys_dir).glob("*.nk"))
    for path in files:
        try:
            if path.stat().st_mode & OTHERS:
                yield str(path)
        except OSError:
            continue


def read_listeners() -> tuple[Listener, ...] | None:
    """The listening TCP sockets of this machine, or of this container, in a fixed order; None where the system does not list them."""
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError, RuntimeError):
        return None
    listening = [connection for connection in connections if connection.status == psutil.CONN_LISTEN]
    return tuple(
        Listener(
            _unmapped(connection.laddr.ip),
            connection.laddr.port,
            connection.pid or 0,
            _command(connection.pid),
        )
        for connection in sorted(listening, key=lambda each: (each.laddr.port, each.laddr.ip, each.pid or 0))
    )


def _unmapped(host: str) -> str:
    """An address; of an IPv4 address in an IPv6 one the former."""
    address = ip_address(host)
    return str((address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address)


def _command(pid: int | None) -> str:
    try:
        return " ".join(filter(None, psutil.Process(pid).cmdline()))[:80] if pid else ""
    except psutil.Error:
        return ""


def _family(pid: int) -> set[int]:
    """Ids of a process and of all below it."""
    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.Error:
        return {pid}


SETTLED_NS: Final = 3_000_000_000
"""A prompt that was computed so long ago has been announced: events follow within milliseconds."""

RECORDS_MAX: Final = 200_000
"""Messages of the log that are looked at: a busy pool writes so many in a few minutes."""


async def pool_facts(ports: Ports, pool: str, hosts: Mapping[str, str], now_ns: int) -> PoolFacts:
    """Read a pool's logs. `hosts` are the machines of its processes, by name; `now_ns` is the server's time."""
    log = await open_log(ports, pool)
    bounds = await log.log.bounds()
    if bounds.last < bounds.first:
        return PoolFacts(pool)
    state = await state_at(log, bounds.last)
    start = max(await log.log.position_at(now_ns - BEFORE_NS), bounds.first - 1, bounds.last - RECORDS_MAX)
    recent = RecentLog()
    async for piece in log.log.scan(start, bounds.last):
        for record in piece.records:
            recent.take(record)
    requests = await _requests(ports, recent, now_ns)
    fleet = FleetAt(bounds.last, max(recent.last_ns, now_ns), state.loads)
    epochs = {name: worker.epoch for name, worker in state.loads.workers.items()}
    return PoolFacts(
        pool,
        tuple(state.loads.workers.values()),
        frozenset(state.cold),
        recent.clocks(hosts),
        recent.served(epochs, now_ns),
        {name: len(recent.stored[name, epoch]) for name, epoch in epochs.items()},
        {name: len(joins) for name, joins in recent.joined.items()},
        tuple(findings(fleet, requests, recent.marks)),
    )


async def _requests(ports: Ports, recent: "RecentLog", now_ns: int) -> RequestTable:
    """The requests of the same time."""
    table = RequestTable()
    log = ports.requests
    bounds = await log.bounds()
    async for piece in log.scan(await log.position_at(now_ns - BEFORE_NS), bounds.last):
        for record in piece.records:
            table.fold(record)
    for decision, position in recent.decisions:
        table.decide(decision, position, recent.block_sizes.get(decision.worker, 1))
    return table


class RecentLog:
    """What the latest messages of a pool's log say."""

    def __init__(self) -> None:
        self.last_ns = 0
        self.marks: list[Mark] = []
        self.decisions: list[tuple[Decision, int]] = []
        self.joined: defaultdict[str, set[int]] = defaultdict(set)
        self.block_sizes: dict[str, int] = {}
        self.stored: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self._prefilled: dict[tuple[str, int, str], int] = {}
        self._behind_ns: defaultdict[str, list[int]] = defaultdict(list)

    def take(self, record: Record) -> None:
        """Take one message."""
        batch = record.batch
        self.last_ns = record.stored_ns
        if batch.wall_ns:
            self._behind_ns[batch.writer].append(record.stored_ns - batch.wall_ns)
        for event in batch.events:
            match event:
                case BlocksStored():
                    self.stored[batch.writer, batch.epoch].update(unpack_hashes(event.hashes).tolist())
                case LoadReported():
                    for request in event.prefilled:
                        self._prefilled[batch.writer, batch.epoch, request] = record.stored_ns
                case Decision():
                    self.decisions.append((event, record.position))
                case _:
                    if isinstance(event, WorkerJoined):
                        self.joined[event.worker].add(event.epoch)
                        self.block_sizes[event.worker] = event.block_size
                    mark = mark_of(record, event)
                    if mark is not None:
                        self.marks.append(mark)

    def served(self, epochs: Mapping[str, int], now_ns: int) -> dict[str, Served]:
        """Of each worker's present incarnation the prompts that it computed blocks of, and those whose last block it announced."""
        by_worker = dict.fromkeys(epochs, Served())
        for decision, _ in self.decisions:
            worker, epoch = decision.worker, decision.epoch
            done_ns = self._prefilled.get((worker, epoch, decision.request))
            if epochs.get(worker) != epoch or done_ns is None or done_ns > now_ns - SETTLED_NS:
                continue
            chosen = next(
                (candidate for candidate in decision.candidates if candidate.worker == worker), None
            )
            if chosen is None or not decision.last or decision.leg == "decode":
                continue
            if chosen.cached_blocks + chosen.lower_blocks >= decision.blocks:
                # All of it was cached: nothing is announced again.
                continue
            previous = by_worker[worker]
            by_worker[worker] = Served(
                previous.prompts + 1, previous.announced + (decision.last in self.stored[worker, epoch])
            )
        return by_worker

    def clocks(self, hosts: Mapping[str, str]) -> tuple[ClockFacts, ...]:
        """The clock of each machine, by its processes that wrote something."""
        by_host: defaultdict[str, list[int]] = defaultdict(list)
        for writer, times in self._behind_ns.items():
            if writer in hosts:
                by_host[hosts[writer]] += times
        return tuple(
            ClockFacts(host, min(times) / 1e9, len(times)) for host, times in sorted(by_host.items())
        )
