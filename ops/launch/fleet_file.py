"""The file that describes a fleet: hosts, NATS, edges, and pools with their routers and workers.

    [settings]                          # of every process, with the keys of a configuration file
    log.format = "json"

    [hosts.a]                           # left out: everything runs on this machine
    address = "10.0.0.1"
    ssh = "ops@10.0.0.1"

    [nats]                              # servers that the fleet starts, or `url` of those that run
    hosts = ["a", "b", "c"]
    keys_dir = "keys"

    [edges]
    count = 2                           # on each of `hosts`, sharing its port
    settings.http.port = 8000

    [pools."Qwen/Qwen3-8B"]             # the name that clients use
    routers.count = 2

    [[pools."Qwen/Qwen3-8B".workers]]
    role = "prefill"
    count = 2                           # on each of `hosts`
    settings.worker.max_model_len = 32768
    arguments = ["--enforce-eager"]     # of the engine's own

A value in a table of settings may be a reference to what a file must not contain: { env = "NAME" } or { file = "PATH" }.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from headwater.engines import registry
from headwater.engines.engine import EngineUnavailable
from headwater.ops.config.processes import all_settings, nearest_key
from headwater.ops.config.setting import ConfigError
from headwater.schemas.events import Role

LOCAL: Final = "local"
"""The name of the only host of a fleet whose file names none."""

Count = Annotated[int, Meta(ge=0, le=4096)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Label = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,40}$")]
Table = dict[str, Any]

T = TypeVar("T")


class Host(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A machine. `address` is what others reach it by; `ssh` the arguments of ssh, at least a destination; `command` what runs Headwater there."""

    address: str = "127.0.0.1"
    ssh: str = ""
    command: str = "headwater"


class Servers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """NATS: `url` of servers that run already, or one server on each of `hosts` (one, three or five).

    `keys_dir` is the folder that `headwater nats-config --out` wrote, on each host. Servers that others than their own host reach need it.
    """

    url: str | Table = ""
    hosts: list[str] = []
    port: Port = 4222
    keys_dir: str = ""
    settings: Table = {}


KINDS: Final = ("edges", "admin", "console", "tracer", "picker")
"""Processes that belong to no pool, as the file names them."""


class Processes(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Processes of one kind: `count` on each of `hosts`, which are all hosts unless named."""

    count: Count = 1
    hosts: list[str] = []
    settings: Table = {}


class Workers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Workers of one engine and role: `count` on each of `hosts`; with `nodes` above 1 one worker on each group of so many hosts."""

    engine: str = registry.DEFAULT_ENGINE
    role: Role = "both"
    count: Annotated[int, Meta(ge=1, le=4096)] = 1
    nodes: Annotated[int, Meta(ge=1, le=256)] = 1
    nodes_port: Port = 29500
    name: Label | None = None
    hosts: list[str] = []
    settings: Table = {}
    arguments: list[str] = []


class PoolOfModel(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model with its routers and workers. `model` is what engines load, unless it is the name that clients use."""

    workers: list[Workers]
    model: str = ""
    routers: Processes = Processes()
    settings: Table = {}


class FleetFile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fleet. Without `hosts` it is that of one machine, `LOCAL`."""

    pools: dict[str, PoolOfModel]
    namespace: str = "default"
    data_dir: str = "headwater-data"
    settings: Table = {}
    hosts: dict[Label, Host] = {}
    nats: Servers = Servers()
    edges: Processes = Processes()
    admin: Processes = Processes(count=0)
    console: Processes = Processes()
    tracer: Processes = Processes(count=0)
    picker: Processes = Processes(count=0)

    @property
    def host_names(self) -> list[str]:
        """The hosts in the file's order."""
        return list(self.hosts) or [LOCAL]

    def host(self, name: str) -> Host:
        """A host. Raises `ConfigError` for one that the file does not name."""
        if not self.hosts and name == LOCAL:
            return Host()
        if name not in self.hosts:
            raise ConfigError(f"host {name}: the fleet's file has the hosts {', '.join(self.host_names)}")
        return self.hosts[name]

    def folder_of(self, name: str) -> str:
        """The data folder of a host: hosts may share a file system."""
        return f"{self.data_dir}/{name}" if self.hosts else self.data_dir

    @property
    def nats_hosts(self) -> list[str]:
        """The hosts that have a NATS server of the fleet, none where others run them."""
        return [] if self.nats.url else self.nats.hosts or self.host_names[:1]


def with_addresses(fleet: FleetFile, addresses: Sequence[str]) -> FleetFile:
    """The same fleet with other addresses of hosts, given as NAME=ADDRESS. Raises `ConfigError`."""
    changed = dict(fleet.hosts)
    for entry in addresses:
        name, _, address = entry.partition("=")
        if not address:
            raise ConfigError(f"--address {entry}: give NAME=ADDRESS")
        changed[name] = msgspec.structs.replace(fleet.host(name), address=address)
    return msgspec.structs.replace(fleet, hosts=changed) if addresses else fleet


def read_fleet(path: Path) -> FleetFile:
    """The fleet of a file. Raises `ConfigError` naming the file and the key."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    return parse_fleet(text, str(path))


def parse_fleet(text: str, source: str) -> FleetFile:
    """The fleet that a text describes, checked. Raises `ConfigError` that begins with `source`."""
    try:
        fleet = msgspec.convert(tomllib.loads(text), FleetFile)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_readable(error)}") from error
    try:
        _check_hosts(fleet)
        _check_pools(fleet)
        _check_nats(fleet)
        for place, table in tables_of(fleet):
            settings_in(table, place, resolve=False)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return fleet


def _readable(error: msgspec.ValidationError) -> str:
    """A message of the validation with its place as TOML has it."""
    reason, _, place = str(error).partition(" - at `")
    place = place.rstrip("`").removeprefix("$").removeprefix(".") or "the file"
    return f"{place.replace('`key` in ', '')}: {reason[:1].lower()}{reason[1:]}"


def _check_hosts(fleet: FleetFile) -> None:
    host_names = set(fleet.host_names)
    for place, part in parts_of(fleet):
        for name in part.hosts:
            if name not in host_names:
                raise ConfigError(
                    f"{place}.hosts: there is no host {name}; the file has {', '.join(fleet.host_names)}"
                )
        if len(set(part.hosts)) < len(part.hosts):
            raise ConfigError(f"{place}.hosts: names a host twice; `count` is the number on each")
    if len(fleet.hosts) > 1:
        addresses = [host.address for host in fleet.hosts.values()]
        twice = next((address for address in addresses if addresses.count(address) > 1), "")
        if twice:
            raise ConfigError(
                f"hosts: two have the address {twice}; each needs the one by which the others reach it"
            )


def parts_of(fleet: FleetFile) -> Iterator[tuple[str, Servers | Processes | Workers]]:
    """What has hosts and settings of its own, each with its place in the file."""
    yield "nats", fleet.nats
    for kind in KINDS:
        yield kind, getattr(fleet, kind)
    for name, pool in fleet.pools.items():
        yield f"pools.{name}.routers", pool.routers
        for number, workers in enumerate(pool.workers):
            yield f"pools.{name}.workers[{number}]", workers


def tables_of(fleet: FleetFile) -> Iterator[tuple[str, Table]]:
    """The tables of settings, each with its place in the file."""
    yield "settings", fleet.settings
    parts = list(parts_of(fleet))
    for place, part in parts:
        if not place.startswith("pools."):
            yield f"{place}.settings", part.settings
    for name, pool in fleet.pools.items():
        yield f"pools.{name}.settings", pool.settings
        for place, part in parts:
            if place.startswith(f"pools.{name}."):
                yield f"{place}.settings", part.settings


def _check_pools(fleet: FleetFile) -> None:
    if not fleet.pools:
        raise ConfigError("pools: a fleet needs a model: [pools.NAME] with [[pools.NAME.workers]]")
    for name, pool in fleet.pools.items():
        if not pool.workers:
            raise ConfigError(f"pools.{name}.workers: there are none")
        if not pool.routers.count:
            raise ConfigError(f"pools.{name}.routers.count: a pool needs a router")
        for number, workers in enumerate(pool.workers):
            hosts = workers.hosts or fleet.host_names
            place = f"pools.{name}.workers[{number}]"
            try:
                registry.find(workers.engine)
            except EngineUnavailable as error:
                raise ConfigError(f"{place}.engine: {error}") from error
            if workers.nodes > 1 and len(hosts) % workers.nodes:
                raise ConfigError(
                    f"{place}.nodes: {len(hosts)} hosts cannot be divided into groups of {workers.nodes}"
                )
            if workers.nodes > 1 and workers.count > 1:
                raise ConfigError(
                    f"{place}.count: with nodes = {workers.nodes} each group of hosts has one worker; leave it out"
                )
    if not fleet.edges.count:
        raise ConfigError("edges.count: a fleet needs an edge")


def _check_nats(fleet: FleetFile) -> None:
    nats = fleet.nats
    if nats.url and nats.hosts:
        raise ConfigError("nats: give either `url` of servers that run, or `hosts` that start one each")
    if len(nats.hosts) not in (0, 1, 3, 5):
        raise ConfigError(f"nats.hosts: {len(nats.hosts)} servers; a cluster has three or five")
    if not nats.url and len(fleet.hosts) > 1 and not nats.keys_dir:
        addresses = ",".join(fleet.host(name).address for name in fleet.nats_hosts)
        count = len(fleet.nats_hosts)
        namespace = "" if fleet.namespace == "default" else f" --namespace {fleet.namespace}"
        raise ConfigError(
            "nats.keys_dir: servers that other hosts reach need keys. Make them with `headwater nats-config --out keys "
            f"--servers {count} --hosts {addresses}{namespace}`, copy the folder to each host, and name it"
        )


# Tables of settings, and references in them.

PLANNED: Final = frozenset(
    {
        "name",
        "data_dir",
        "pool",
        "for_model",
        "nats.url",
        "nats.port",
        "nats.namespace",
        "nats.keys_dir",
        "worker.engine",
        "worker.model",
        "worker.role",
        "worker.served_model_name",
        "http.share_port",
        "capture",
    }
)
"""Settings that follow from the rest of the file."""


def settings_in(
    table: Mapping[str, Any], place: str, below: Mapping[str, Any] | None = None, *, resolve: bool = True
) -> dict[str, Any]:
    """The values of a table by key, checked, over those of the levels `below`. Without `resolve` references are checked and left out.

    Raises `ConfigError`.
    """
    below = below or {}
    return {**below, **dict(_settings_in(table, place, "", below, resolve))}


def _settings_in(
    table: Mapping[str, Any], place: str, prefix: str, below: Mapping[str, Any], resolve: bool
) -> Iterator[tuple[str, Any]]:
    settings = all_settings()
    for name, value in table.items():
        key = f"{prefix}{name}"
        if key in PLANNED or key.startswith(("fleet.", "processes.")):
            raise ConfigError(f"{place}.{key}: follows from the rest of the file; leave it out here")
        if key in settings:
            if is_reference(value):
                if not resolve:
                    _check_reference(value, f"{place}.{key}")
                    continue
                value = resolved(value, f"{place}.{key}")
            elif settings[key].fields and isinstance(value, dict):
                value = _without_references(value, f"{place}.{key}", resolve)
            yield key, settings[key].read([value], f"{place}.{key} = ", below.get(key))
        elif isinstance(value, dict) and any(setting_key.startswith(f"{key}.") for setting_key in settings):
            yield from _settings_in(value, place, f"{key}.", below, resolve)
        else:
            near = nearest_key(key)
            raise ConfigError(f"{place}: unknown setting {key}{near and f'; did you mean {near}?'}")


def is_reference(value: Any) -> bool:
    """Does a value stand for a variable or a file?"""
    return isinstance(value, dict) and bool(value) and set(value) <= {"env", "file"}


def _without_references(table: Mapping[str, Any], place: str, resolve: bool) -> dict[str, Any]:
    """A setting that is a table, with what its references stand for; without `resolve` they are checked and left out."""
    settings = {}
    for name, value in table.items():
        if not is_reference(value):
            settings[name] = value
        elif resolve:
            settings[name] = resolved(value, f"{place}.{name}")
        else:
            _check_reference(value, f"{place}.{name}")
    return settings


def _check_reference(value: Mapping[str, Any], place: str) -> tuple[str, str]:
    if len(value) != 1 or not all(isinstance(text, str) and text for text in value.values()):
        raise ConfigError(f'{place}: a reference is {{ env = "NAME" }} or {{ file = "PATH" }}')
    return next(iter(value.items()))


def resolved(value: str | Mapping[str, Any], place: str) -> str:
    """A text, or what a reference to a variable or a file stands for on this machine. Raises `ConfigError`."""
    if isinstance(value, str):
        return value
    kind, name = _check_reference(value, place)
    if kind == "env":
        if name not in os.environ:
            raise ConfigError(f"{place}: the variable {name} is not set")
        return os.environ[name]
    try:
        return Path(os.path.expanduser(name)).read_text().strip()
    except OSError as error:
        raise ConfigError(f"{place}: {name}: {error.strerror}") from error
