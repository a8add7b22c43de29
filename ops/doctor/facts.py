"""The facts that the doctor's checks are about. What could not be learned is None or empty, and named among what was skipped."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from headwater.events.jetstream.streams import StreamStatus
from headwater.ops.diagnosis.server import ServerFacts
from headwater.ops.history.findings import Finding as HistoryFinding
from headwater.router.fold.worker import Worker
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
