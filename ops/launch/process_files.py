"""The processes of a host, one by one, as other supervisors start them: a name, a command, a configuration file, and what must come from outside."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from headwater.ops.config.processes import PoolOperator, all_settings, settings_below
from headwater.ops.config.setting import value_at
from headwater.ops.launch import hosts
from headwater.ops.launch.fleet_file import FleetFile
from headwater.ops.start import plan


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
    wanted = hosts.plan_host(fleet, host, remote=True)
    if host == fleet.host_names[0]:
        # With limited rights only the operator may create streams.
        pools = PoolOperator(nats=wanted.nats, streams=wanted.streams, log=wanted.log)
        yield _process(fleet, "pools", pools, ("--watch",))
    for router in wanted.routers:
        yield _process(fleet, "router", router)
    for edge in wanted.edges:
        shared = edge.http._replace(share_port=len(wanted.edges) > 1)
        yield _process(fleet, "edge", edge._replace(http=shared))
    alone = ("admin", wanted.admin), ("console", wanted.console), ("tracer", wanted.tracer)
    for kind, single in (*alone, ("picker", wanted.picker)):
        if single is not None:
            yield _process(fleet, kind, single._replace(nats=wanted.nats))
    for engines in wanted.engines:
        launcher = plan.launcher_for(engines)
        # Ports that nobody chose are found where the worker starts, not here.
        chosen = launcher.side_ports([role for _, role in plan.names(engines)]).first
        for worker in plan.plan(engines):
            here = worker if chosen else worker._replace(side_port=0)
            own, after = plan.apart(plan.of_worker(engines, here))
            gpus = launcher.gpus() if plan.uses_gpus(engines) else 0
            yield _process(fleet, "engine", own, tuple(after))._replace(engine=worker.engine, gpus=gpus)
    for follower in wanted.followers:
        own, after = plan.apart(follower)
        found = _process(fleet, "engine", own, tuple(after))
        yield found._replace(name=f"{follower.name}-follower", engine=follower.worker.engine)


def _process(fleet: FleetFile, kind: str, process: Any, after: tuple[str, ...] = ()) -> HostProcess:
    settings = {
        one.key: value
        for name in process._fields
        for one in settings_below(name)
        if (value := value_at(process, one.path)) != one.default and one.key != "fleet.workers"
    }
    references = {
        all_settings()[key].variable: reference
        for key, reference in references_of(fleet).items()
        if all_settings()[key].path[0] in process._fields
    }
    return HostProcess(getattr(process, "name", kind), kind, settings, references, after)


def references_of(fleet: FleetFile) -> dict[str, Mapping[str, str]]:
    """All references of a fleet's file by the setting's key."""
    found: dict[str, Mapping[str, str]] = {}
    tables = [fleet.settings, fleet.nats.settings]
    tables += [one.settings for one in (fleet.edges, fleet.admin, fleet.console, fleet.tracer, fleet.picker)]
    for pool in fleet.pools.values():
        tables += [pool.settings, pool.routers.settings, *(one.settings for one in pool.workers)]
    for table in tables:
        found |= _references_in(table, "")
    if isinstance(fleet.nats.url, dict):
        found["nats.url"] = fleet.nats.url
    return found


def _references_in(table: Mapping[str, Any], prefix: str) -> dict[str, Mapping[str, str]]:
    found: dict[str, Mapping[str, str]] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            if key in all_settings() and value and set(value) <= {"env", "file"}:
                found[key] = value
            elif key not in all_settings():
                found |= _references_in(value, f"{key}.")
    return found


def _toml(key: str, value: Any) -> str:
    """A value as TOML has it; what has a text of its own as that text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    # JSON's strings are TOML's basic strings.
    return json.dumps(all_settings()[key].write(value))
