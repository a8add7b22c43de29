"""The simulated fleet: its processes, and their supervision."""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from headwater.actors.edge.actor import EdgeActor
from headwater.actors.edge.settings import AccessSettings
from headwater.actors.http.asgi import Headers
from headwater.actors.router.actor import RouterActor
from headwater.actors.runtime.actor import Actor, RestartPolicy, supervise
from headwater.actors.runtime.ports import PROBE_S, Ports
from headwater.actors.worker.actor import WorkerActor
from headwater.actors.worker.model_card import Served
from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.engine import Engine
from headwater.engines.model_files import byte_model_files
from headwater.engines.sim import StepTime, model
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.engines.sim.handoff import SimFabric, SimHandoff
from headwater.engines.sim.model import SimEncoder
from headwater.engines.transfer.local import TransferFault
from headwater.events.ports import Log
from headwater.ops.sim.images import NEVER_S, SimIntake, SimTransfers
from headwater.ops.sim.loop import VirtualLoop
from headwater.ops.sim.network import LATENCY_S, Network, NetworkTrace, Process, SimBus, SimHttpServer
from headwater.ops.sim.ports import SimBlobs, SimLog, SimTable, Store
from headwater.router.queue import BusyLimits, Order, QueueLimits, QueueSettings
from headwater.schemas.events import BlocksStored, Role
from headwater.schemas.inference import Choreography
from headwater.schemas.names import pool_name
from headwater.schemas.routing import Weights

TAINT: Final = "batch"
UNTAINTED: Final = (0, 3, 7)
"""Numbers of the engines without taints: one of each role with disaggregation."""


def crowded(seed: int) -> bool:
    """Does this seed run a crowded fleet?"""
    return seed % 3 == 2


def queue_of(seed: int) -> QueueSettings | None:
    """The saturation thresholds and queue bounds of this seed."""
    if not crowded(seed):
        return None
    draw = random.Random(f"queue {seed}")
    busy = draw.choice(
        [BusyLimits(prefill_tokens=64), BusyLimits(0, kv=0.05), BusyLimits(0, kv=0.2, waiting=1)]
    )
    order: Order = "shortest_uncached" if draw.random() < 0.5 else "fcfs"
    limits = QueueLimits(
        requests=draw.choice([2, 8, 64]), tenant_share=0.5, wait_s=draw.choice([2.0, 20.0]), order=order
    )
    return QueueSettings(busy, limits)


def taints_of(seed: int, engine: int) -> tuple[str, ...]:
    """The taints of an engine, by its number."""
    return (TAINT,) if crowded(seed) and engine not in UNTAINTED else ()


def routing_headers(draw: random.Random) -> Headers:
    """Routing headers of one client of a crowded fleet."""
    headers: Headers = [(b"x-headwater-tenant", draw.choice([b"a", b"a", b"a", b"b"]))]
    if draw.random() < 0.2:
        headers.append((b"x-headwater-tolerates", TAINT.encode()))
    if draw.random() < 0.2:
        headers.append((b"x-headwater-deadline-ms", b"%d" % draw.choice([200, 2_000, 20_000])))
    return headers


# The fleet.

NAMESPACE: Final = "sim"
MODEL: Final = "sim"
BLOCK_SIZE: Final = 16
POOL: Final = pool_name(MODEL, BLOCK_SIZE)
SCRIPT: Final = model.script()
FILES: Final = byte_model_files(MODEL)
DRAIN_S: Final = 5.0

SETTINGS: Final = SimSettings(
    block_size=BLOCK_SIZE,
    total_blocks=96,
    context_length=2_048,
    step_tokens_max=512,
    sequences_max=16,
    step_time=StepTime((0.0, 0.05, 20.0), (0.0, 0.0, 30.0), (0.0, 4.0, 40.0)),
    script=SCRIPT,
    media=model.media_support(),
    embedding_tokens=64,
)
"""Small caches, so that blocks and embeddings are evicted and sequences preempted within a minute."""

WEIGHTS: Final = Weights(transfer=0.0, interference=8.0, local_tokens=16)
"""Weights with which some of the short prompts here are handed off."""

POLICY: Final = RestartPolicy(restarts_max=1_000)
"""Faults are more frequent here than the default restart limit allows."""


def names(kind: str, count: int) -> list[str]:
    """Names of `count` processes of a kind."""
    return [f"{kind}-{number}" for number in range(count)]


class SimFleet:
    """Engines, routers, edges and encode workers by name. Names are permanent; their processes are replaced."""

    def __init__(
        self,
        loop: VirtualLoop,
        draw: random.Random,
        trace: NetworkTrace,
        engines: list[str],
        routers: list[str],
        edges: list[str],
        roles: Sequence[Role] = (),
        choreography: Choreography = "returned",
        seed: int = 0,
        settings: SimSettings = SETTINGS,
        access: AccessSettings | None = None,
        encoders: Sequence[str] = (),
    ) -> None:
        self.loop = loop
        self._settings = settings
        self.fabric = SimFabric()
        self.roles: dict[str, Role] = dict(zip(engines, roles, strict=False))
        self._choreography: Choreography = choreography
        self._seed = seed
        self._access = access
        self.network = Network(loop, draw, trace)
        self.store = Store(loop, self.network, draw, trace)
        self.engines, self.routers, self.edges = engines, routers, edges
        self.encoders = list(encoders)
        self.revisions: dict[str, str] = {}
        """Revisions of engines by their names, where a test sets them; others have the default."""
        self.own_settings: dict[str, SimSettings] = {}
        """Settings of engines that differ from the others'."""
        self.transfers = SimTransfers(Process("transfers", loop), self._disturbed_read)
        self._read_draw = random.Random(f"reads {seed}")
        self.processes: dict[str, Process] = {}
        self.actors: dict[str, Actor] = {}
        self.router_lives: list[RouterActor] = []
        self.servers: dict[str, SimHttpServer] = {}
        self.sim_engines: dict[str, SimEngine] = {}
        self.sim_encoders: dict[str, SimEncoder] = {}
        self.stuck: list[str] = []
        self.unexpected: list[str] = []
        self._lives = 0

    @property
    def names(self) -> list[str]:
        """All processes' names."""
        return [*self.engines, *self.routers, *self.edges, *self.encoders]

    @property
    def workers(self) -> list[str]:
        """All workers' names, sorted."""
        return sorted([*self.engines, *self.encoders])

    def cached_blocks(self, worker: str) -> list[BlocksStored]:
        """The blocks that a worker's engine holds, without removing its pending events: those would never be logged."""
        either = self.sim_encoders if worker in self.encoders else self.sim_engines
        return either[worker].cached_blocks()

    def router(self, name: str) -> RouterActor:
        """The router actor of this name."""
        actor = self.actors[name]
        assert isinstance(actor, RouterActor), f"{name} is not a router"
        return actor

    def edge(self, name: str) -> EdgeActor:
        """The edge actor of this name."""
        actor = self.actors[name]
        assert isinstance(actor, EdgeActor), f"{name} is not an edge"
        return actor

    def worker(self, name: str) -> WorkerActor:
        """The worker actor of this name."""
        actor = self.actors[name]
        assert isinstance(actor, WorkerActor), f"{name} is not a worker"
        return actor

    def start(self, name: str) -> None:
        """Start the process of this name."""
        self._lives += 1
        process = self.processes[name] = Process(name, self.loop)
        ports = self.ports(process, f"{name}-{self._lives}")
        make = self._maker(name, ports)

        async def one_incarnation() -> str:
            actor = make()
            # A process whose name was taken by another may run for some time.
            if self.processes[name] is process:
                self.actors[name] = actor
            try:
                return await actor.run()
            finally:
                self.unexpected += [f"{name} failed: {error!r}" for error in actor.unexpected]

        process.start(supervise(name, one_incarnation, process, POLICY), "main")

    async def kill(self, name: str) -> None:
        """SIGKILL the process of this name."""
        process = self.processes[name]
        if process.alive:
            self.stuck += await process.kill()

    async def stop(self) -> None:
        """Stop all processes, in an order in which no request is left waiting."""
        for group in (self.edges, self.workers, self.routers):
            for name in group:
                self.actors[name].stop()
            waiting = [task for name in group for task in self.processes[name].group.tasks]
            if waiting:
                _, late = await asyncio.wait(waiting, timeout=DRAIN_S + 5.0)
                self.stuck += [task.get_name() for task in late]

    def _maker(self, name: str, ports: Ports) -> Callable[[], Actor]:
        process = self.processes[name]

        def engine() -> Actor:
            unique = f"{name}-{self._lives}-{process.ids}"
            handoff = SimHandoff(unique, process, self.fabric, self._choreography)
            split_only = self._choreography == "room" and self.roles.get(name, "both") != "both"
            reads = bool(self.encoders) and self.roles.get(name, "both") != "decode"
            settings = self.own_settings.get(name, self._settings)._replace(
                split_only=split_only, reads_embeddings=reads
            )
            made = SimEngine(settings, process, handoff)
            process.on_kill(partial(self.fabric.drop_engine, unique))
            if self.processes[name] is process:
                self.sim_engines[name] = made
            return worker(made, self._profile(name))

        def encoder() -> Actor:
            made = SimEncoder(self._settings, process)
            if self.processes[name] is process:
                self.sim_encoders[name] = made
            return worker(made, WorkerProfile(role="encode", instance=name))

        def worker(made: Engine, profile: WorkerProfile) -> Actor:
            return WorkerActor(
                ports,
                name,
                made,
                Served(MODEL, FILES),
                drain_s=DRAIN_S,
                profile=profile,
                open_transfer=partial(self.transfers.open, name, process),
            )

        def router() -> Actor:
            queue = queue_of(self._seed)
            made = RouterActor(ports, name, POOL, weights=WEIGHTS, queue=queue, probe_s=PROBE_S)
            self.router_lives.append(made)
            return made

        def edge() -> Actor:
            server = SimHttpServer(self.network, self.loop, name)
            if self.processes[name] is process:
                self.servers[name] = server
            process.on_kill(server.kill)
            return EdgeActor(
                ports,
                name,
                server,
                drain_s=DRAIN_S,
                probe_s=PROBE_S,
                access=self._access,
                intake=SimIntake(),
            )

        groups = ((self.engines, engine), (self.routers, router), (self.encoders, encoder))
        return next((make for group, make in groups if name in group), edge)

    def _profile(self, name: str) -> WorkerProfile:
        """What an engine's worker is started as."""
        return WorkerProfile(
            role=self.roles.get(name, "both"),
            instance=name,
            taints=taints_of(self._seed, self.engines.index(name)),
            revision=self.revisions.get(name, ""),
        )

    def _disturbed_read(self) -> TransferFault:
        """A read of an embedding: as late as a message, and where one is lost it ends by its reader's patience."""
        network = self.network
        lost = network.drop and self._read_draw.random() < network.drop
        return TransferFault(NEVER_S if lost else self._read_draw.uniform(*LATENCY_S) + network.delay_s)

    def ports(self, process: Process, unique: str) -> Ports:
        """The ports of a process."""
        store = self.store

        async def pool_log(pool: str) -> Log:
            return SimLog(store, store.pool(pool), process, pool)

        def ids() -> str:
            process.ids += 1
            return f"{unique}-{process.ids}"

        return Ports(
            ns=NAMESPACE,
            bus=SimBus(self.network, process),
            leases=SimTable(store, store.leases, process),
            cards=SimTable(store, store.cards, process),
            api_keys=SimTable(store, store.api_keys, process),
            secrets=SimTable(store, store.secrets, process),
            blobs=SimBlobs(store, process),
            stored=SimTable(store, store.stored, process),
            videos=SimTable(store, store.videos, process),
            requests=SimLog(store, store.requests, process, "requests"),
            pool_log=pool_log,
            clock=process,
            ids=ids,
        )
