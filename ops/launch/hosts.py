"""The processes of each host of a fleet's file, as settings.

Other supervisors start them one by one: with a name, a command, a configuration file, and what must come from outside.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from headwater.engines import registry
from headwater.ops.config.processes import (
    DEFAULTS,
    AdminProcess,
    ConsoleProcess,
    EdgeProcess,
    EngineProcess,
    PickerProcess,
    PoolOperator,
    RouterProcess,
    Settings,
    TracerProcess,
    all_settings,
    engine_options,
    setting,
    settings_below,
    with_engine_options,
)
from headwater.ops.config.sections import NatsSettings, StreamSettings
from headwater.ops.config.setting import ConfigError, value_at, with_values
from headwater.ops.config.sources import NATIVE
from headwater.ops.config.worker import FleetSettings
from headwater.ops.launch.fleet_file import (
    FleetFile,
    Processes,
    Table,
    Workers,
    is_reference,
    resolved,
    settings_in,
    tables_of,
)
from headwater.ops.nats import config as nats_config
from headwater.ops.start import plan
from headwater.ops.start.machine import MachinePlan, ServerPlan
from headwater.schemas.names import host_port, slug

REPLICAS_MAX: Final = 3
"""Copies of the log in a cluster of servers: a fourth costs writes and saves nothing that three do not."""


def plan_host(fleet: FleetFile, host: str, *, remote: bool = False) -> MachinePlan:
    """What a host runs. References in the file are resolved here. With `remote` the plan is for another machine to carry out.

    Raises `ConfigError`.
    """
    fleet.host(host)
    part = _HostPart(fleet, host, resolve=not remote)
    streams = StreamSettings(replicas=min(len(fleet.nats_hosts), REPLICAS_MAX) or 1)
    shared: Settings = with_fields(DEFAULTS._replace(streams=streams), part.shared)
    access: dict[str, Any] = {"nats": part.nats(), "streams": shared.streams}
    groups = [(rank, one._replace(**access)) for rank, one in part.workers()]
    return MachinePlan(
        data_dir=fleet.folder_of(host),
        drain_timeout=shared.drain_timeout,
        metrics=shared.metrics,
        log=shared.log,
        server=server_plan(fleet, host) if host in fleet.nats_hosts and not remote else None,
        edges=tuple(one._replace(**access) for one in part.processes("edges", EdgeProcess)),
        routers=tuple(one._replace(**access) for one in part.routers()),
        engines=tuple(one for rank, one in groups if not rank),
        followers=tuple(one for rank, one in groups if rank),
        admin=part.single("admin", AdminProcess, access["nats"]),
        console=part.single("console", ConsoleProcess, access["nats"]),
        tracer=part.single("tracer", TracerProcess, access["nats"]),
        picker=part.single("picker", PickerProcess, access["nats"]),
        wanted_workers=wanted_workers(fleet),
        has_picker=fleet.picker.count > 0,
        address=fleet.host(host).address if fleet.hosts else "",
        started_by="launch",
        **access,
    )


def shared_settings(fleet: FleetFile) -> Settings:
    """All settings with those that the file has for every process; without references."""
    shared: Settings = with_fields(DEFAULTS, settings_in(fleet.settings, "settings", resolve=False))
    return shared


def with_fields(base: Any, values: Mapping[str, Any]) -> Any:
    """A process's settings with those values that it has; it is no error to have none of a shared one."""
    applicable = {
        setting(key).path: value for key, value in values.items() if setting(key).path[0] in base._fields
    }
    return with_values(base, applicable) if applicable else base


def refuse_foreign(kind: Any, values: Mapping[str, Any], place: str) -> None:
    """Refuse settings that a kind of process does not have. Raises `ConfigError`."""
    for key in values:
        if setting(key).path[0] not in kind._fields:
            raise ConfigError(f"{place}.{key}: these processes have no such setting")


def server_plan(fleet: FleetFile, host: str) -> ServerPlan:
    """The NATS server of a host. Raises `ConfigError`."""
    nats = fleet.nats
    exact = nats.port not in (0, NatsSettings().port)
    if len(fleet.hosts) < 2:
        return ServerPlan(nats.port, exact_port=exact)
    hosts = fleet.nats_hosts
    addresses = tuple(fleet.host(name).address for name in hosts)
    nats_plan = nats_config.Wanted(fleet.namespace, servers=len(hosts), hosts=addresses, port=nats.port)
    settings = nats_config.server_settings(nats_plan, hosts.index(host), Path(nats.keys_dir))
    return ServerPlan(nats.port, fleet.host(host).address, exact_port=True, settings=settings)


class _HostPart(NamedTuple):
    """The part of a fleet that one host runs. References are resolved on this machine, or left out. Its methods raise `ConfigError`."""

    fleet: FleetFile
    host: str
    resolve: bool

    def values(self, table: Table, place: str, below: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The values of a table of settings by key, over those of outer tables."""
        return settings_in(table, place, below, resolve=self.resolve)

    def own_values(
        self, kind: Any, part: Processes | Workers, place: str, below: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Those of processes of a kind, whose own table has no others' settings."""
        place = f"{place}.settings"
        refuse_foreign(kind, self.values(part.settings, place), place)
        return self.values(part.settings, place, below)

    @property
    def shared(self) -> dict[str, Any]:
        """Those of all processes."""
        return self.values(self.fleet.settings, "settings")

    def nats(self) -> NatsSettings:
        """How the host's processes reach NATS: the host's own server first."""
        fleet, nats = self.fleet, self.fleet.nats
        url = ""
        if nats.url and self.resolve:
            url = resolved(nats.url, "nats.url")
        elif nats.url:
            url = nats.url if isinstance(nats.url, str) else ""
        elif len(fleet.hosts) > 1:
            hosts = sorted(fleet.nats_hosts, key=lambda name: name != self.host)
            url = ",".join(f"nats://{host_port(fleet.host(name).address, nats.port)}" for name in hosts)
        base = NatsSettings(url=url, port=nats.port, namespace=fleet.namespace, keys_dir=nats.keys_dir)
        values = self.values(nats.settings, "nats.settings")
        for key in values:
            if not key.startswith("nats."):
                raise ConfigError(f"nats.settings.{key}: these are settings of nats only")
        found: NatsSettings = with_fields(DEFAULTS._replace(nats=base), values).nats
        return found

    def numbers(self, wanted: Processes) -> range:
        """The numbers of the host's processes of a kind among those of all hosts."""
        hosts = wanted.hosts or self.fleet.host_names
        if self.host not in hosts:
            return range(0)
        first = hosts.index(self.host) * wanted.count
        return range(first, first + wanted.count)

    def processes(self, field: str, kind: Any) -> Iterator[Any]:
        """The host's edges, or its admin port, console, tracer or picker."""
        wanted: Processes = getattr(self.fleet, field)
        if field != "edges" and not wanted.hosts:
            # One for the whole fleet.
            wanted = msgspec.structs.replace(wanted, hosts=self.fleet.host_names[:1])
        if field != "edges" and wanted.count > 1:
            raise ConfigError(f"{field}.count: a host has one; name several `hosts` for several")
        base = with_fields(kind(), self.own_values(kind, wanted, field, self.shared))
        if kind is TracerProcess:
            base = base._replace(data_dir=self.fleet.folder_of(self.host))
        for number in self.numbers(wanted):
            yield base._replace(name=f"{field.removesuffix('s')}-{number}")

    def single(self, field: str, kind: Any, nats: NatsSettings) -> Any:
        """The one process of a kind, None without."""
        found = next(self.processes(field, kind), None)
        return None if found is None else found._replace(nats=nats)

    def routers(self) -> Iterator[RouterProcess]:
        """The host's routers of all pools: without `hosts` those of a pool run on the hosts of NATS."""
        fleet, shared = self.fleet, self.shared
        for model, pool in fleet.pools.items():
            wanted = pool.routers
            if not wanted.hosts:
                wanted = msgspec.structs.replace(wanted, hosts=fleet.nats_hosts or fleet.host_names)
            of_pool = self.values(pool.settings, f"pools.{model}.settings", shared)
            values = self.own_values(RouterProcess, wanted, f"pools.{model}.routers", of_pool)
            base: RouterProcess = with_fields(RouterProcess(for_model=model), values)
            prefix = "router" if len(fleet.pools) == 1 else f"router-{short_name(model)}"
            for number in self.numbers(wanted):
                yield base._replace(name=f"{prefix}-{number}")

    def workers(self) -> Iterator[tuple[int, EngineProcess]]:
        """The host's workers by entries of the file: of those that span several hosts rank 0 is the worker, and the others follow it."""
        seen: set[str] = set()
        for model, pool in self.fleet.pools.items():
            for number, workers in enumerate(pool.workers):
                place = f"pools.{model}.workers[{number}]"
                name = self._group_name(model, workers)
                if name in seen and not workers.name:
                    name = f"{name}-{number}"
                if name in seen:
                    raise ConfigError(f"{place}.name: {name} is the name of other workers, too")
                seen.add(name)
                if self.host in (workers.hosts or self.fleet.host_names):
                    yield self._group(model, workers, place, name)

    def _group_name(self, model: str, workers: Workers) -> str:
        if workers.name:
            return workers.name
        kind = "worker" if workers.role == "both" else workers.role
        return kind if len(self.fleet.pools) == 1 else f"{short_name(model)}-{kind}"

    def _group(self, model: str, workers: Workers, place: str, name: str) -> tuple[int, EngineProcess]:
        pool, hosts = self.fleet.pools[model], workers.hosts or self.fleet.host_names
        of_pool = self.values(pool.settings, f"pools.{model}.settings", self.shared)
        base: EngineProcess = with_fields(
            EngineProcess(), self.own_values(EngineProcess, workers, place, of_pool)
        )
        own, loads = base.worker, registry.traits_of(workers.engine).loads != "nothing"
        has_encoders = any(one.role == "encode" for one in pool.workers)
        reads = own.embeddings.read or (workers.role in ("both", "prefill") and has_encoders)
        base = base._replace(
            name=_name_on(name, hosts, self.host, workers),
            fleet=FleetSettings(workers=workers.count),
            worker=own._replace(
                engine=workers.engine,
                profile=own.profile._replace(role=workers.role),
                model=pool.model or (model if loads else ""),
                served_model_name=model,
                embeddings=own.embeddings._replace(read=reads),
            ),
        )
        rank = hosts.index(self.host) % workers.nodes
        arguments = list(workers.arguments)
        if workers.nodes > 1:
            leader = self.fleet.host(hosts[hosts.index(self.host) - rank]).address
            if rank:
                # It has no requests of its own, and so no role.
                base = with_fields(base, {"worker.role": "both"})
            arguments += plan.launcher_for(base).node_arguments(
                workers.nodes, rank, leader, workers.nodes_port
            )
        return rank, _with_arguments(base, arguments, f"{place}.arguments")


def short_name(model: str) -> str:
    """A model's name as part of a process's: without its organisation."""
    return slug(model.rpartition("/")[2])[:40].rstrip("-")


def _name_on(name: str, hosts: Sequence[str], host: str, workers: Workers) -> str:
    """The name of the workers of one host; `plan` numbers those of one process."""
    if len(hosts) == 1:
        return name
    return f"{name}-{host}" if workers.nodes == 1 else f"{name}-{hosts.index(host) // workers.nodes}"


def _with_arguments(settings: EngineProcess, arguments: Sequence[str], place: str) -> EngineProcess:
    """The same settings with arguments of the engine's own. Raises `ConfigError` for an engine that has none."""
    if not arguments:
        return settings
    engine = settings.worker.engine
    options = engine_options(settings, engine)
    if not hasattr(options, NATIVE):
        raise ConfigError(f"{place}: the engine {engine} has no arguments of its own")
    native = (*getattr(options, NATIVE), *arguments)
    return with_engine_options(settings, engine, options._replace(**{NATIVE: native}))


def wanted_workers(fleet: FleetFile) -> int:
    """How many workers the whole fleet has."""
    total = 0
    for pool in fleet.pools.values():
        for workers in pool.workers:
            total += len(workers.hosts or fleet.host_names) // workers.nodes * workers.count
    return total


# The processes of a host, for other supervisors.


class HostProcess(NamedTuple):
    """One process of a host. `kind` is its command; `settings` differ from the defaults, by key; `after` follows `--`.

    `references` are settings whose values are not in the fleet's file: the variable that Headwater reads, and the reference.
    """

    name: str
    kind: str
    settings: dict[str, Any]
    references: dict[str, Mapping[str, str]]
    after: tuple[str, ...] = ()
    engine: str = ""
    gpus: int = 0

    def config(self) -> str:
        """Its settings as a configuration file."""
        lines = [f"{key} = {_toml(key, value)}" for key, value in self.settings.items()]
        return "\n".join(lines) + "\n"


def processes_of(fleet: FleetFile, host: str) -> Iterator[HostProcess]:
    """A host's processes in the order in which they start, workers one by one. Raises `ConfigError`."""
    machine_plan = plan_host(fleet, host, remote=True)
    if host == fleet.host_names[0]:
        # With limited rights only the operator may create streams.
        pools = PoolOperator(nats=machine_plan.nats, streams=machine_plan.streams, log=machine_plan.log)
        yield _process(fleet, "pools", pools, ("--watch",))
    for router in machine_plan.routers:
        yield _process(fleet, "router", router)
    for edge in machine_plan.edges:
        shared = edge.http._replace(share_port=len(machine_plan.edges) > 1)
        yield _process(fleet, "edge", edge._replace(http=shared))
    for kind, single in machine_plan.singles:
        yield _process(fleet, kind, single)
    for engines in machine_plan.engines:
        launcher = plan.launcher_for(engines)
        # Ports that nobody chose are found where the worker starts, not here.
        chosen = engines.worker.handoff_port
        for worker in plan.plan(engines):
            placed_worker = worker if chosen else worker._replace(side_port=0)
            process_settings, after = plan.apart(plan.of_worker(engines, placed_worker))
            gpus = launcher.gpus() if plan.uses_gpus(engines) else 0
            yield _process(fleet, "engine", process_settings, tuple(after))._replace(
                engine=worker.engine, gpus=gpus
            )
    for follower in machine_plan.followers:
        process_settings, after = plan.apart(follower)
        process = _process(fleet, "engine", process_settings, tuple(after))
        yield process._replace(name=f"{follower.name}-follower", engine=follower.worker.engine)


def _process(fleet: FleetFile, kind: str, process: Any, after: tuple[str, ...] = ()) -> HostProcess:
    settings = {
        setting.key: value
        for name in process._fields
        for setting in settings_below(name)
        if (value := value_at(process, setting.path)) != setting.default and setting.key != "fleet.workers"
    }
    references = {
        all_settings()[key].variable: reference
        for key, reference in references_of(fleet).items()
        if all_settings()[key].path[0] in process._fields
    }
    return HostProcess(getattr(process, "name", kind), kind, settings, references, after)


def references_of(fleet: FleetFile) -> dict[str, Mapping[str, str]]:
    """All references of a fleet's file by the setting's key."""
    references: dict[str, Mapping[str, str]] = {}
    for _, table in tables_of(fleet):
        references |= _references_in(table, "")
    if isinstance(fleet.nats.url, dict):
        references["nats.url"] = fleet.nats.url
    return references


def _references_in(table: Mapping[str, Any], prefix: str) -> dict[str, Mapping[str, str]]:
    references: dict[str, Mapping[str, str]] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            if is_reference(value):
                references[key] = value
            else:
                references |= _references_in(value, f"{key}.")
    return references


def _toml(key: str, value: Any) -> str:
    """A value as TOML has it; what has a text of its own as that text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    # JSON's strings are TOML's basic strings.
    return json.dumps(all_settings()[key].write(value))
