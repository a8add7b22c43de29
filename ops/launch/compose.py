"""A fleet of one machine for Docker Compose: a service for NATS, and one for each process, with its configuration inline.

Images are those of `deploy/images`: one for everything that has no engine, and one for each engine.
"""

import json
from typing import Any, Final

from headwater.engines import registry as engine_registry
from headwater.ops.config.sections import AdminSettings, ConsoleSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.launch import hosts
from headwater.ops.launch.fleet_file import LOCAL, FleetFile
from headwater.ops.launch.hosts import HostProcess, processes_of
from headwater.ops.nats import server as nats_server
from headwater.schemas.names import NATS_PORT, is_loopback

STOP_MARGIN_S: Final = 30
METRICS_PORT: Final = 9090
"""In its container every process has an address of its own."""

OPERATORS: Final = {"console": ConsoleSettings().port, "admin": AdminSettings().port}
"""Processes for operators, and their ports. What they demand beyond the loopback address is theirs to check."""

CACHE: Final = "/var/cache/headwater"
MODELS: Final = "/models"
"""Folder of downloaded weights, which outlives a container."""

CONFIG_PATH: Final = "/etc/headwater/config.toml"

LIVE: Final = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{METRICS_PORT}/live', timeout=5)"


def render(fleet: FleetFile, *, registry: str, tag: str) -> str:
    """The Compose file. Images are `registry`/headwater and `registry`/headwater-ENGINE with this tag. Raises `ConfigError`."""
    import yaml

    if fleet.hosts:
        raise ConfigError("compose: runs the fleet of one machine; the file names hosts")
    drain = int(hosts.shared_settings(fleet).drain_timeout)
    services: dict[str, Any] = {}
    configs: dict[str, Any] = {}
    volumes: dict[str, Any] = {"data": {}}
    if fleet.nats_hosts:
        config = nats_server.loopback_config(NATS_PORT, "/data/jetstream") | {
            "listen": f"0.0.0.0:{NATS_PORT}"
        }
        configs["nats"] = {"content": json.dumps(config, indent=2)}
        services["nats"] = {
            "image": _image("", registry, tag),
            "command": ["nats-server", "-c", "/etc/nats.conf"],
            "configs": [{"source": "nats", "target": "/etc/nats.conf"}],
            "volumes": ["data:/data"],
            "restart": "unless-stopped",
            "stop_signal": "SIGUSR2",
            "stop_grace_period": "150s",
        }
    published = 0
    left_out = []
    for process in processes_of(fleet, LOCAL):
        if process.kind in OPERATORS and is_loopback(_host_of(process)):
            left_out.append(process.name)
            continue
        inside = _in_container(process, bool(fleet.nats_hosts))
        configs[process.name] = {"content": inside.config().replace("$", "$$")}
        services[process.name] = _service(inside, registry, tag, drain)
        if fleet.nats_hosts:
            services[process.name]["depends_on"] = ["nats"]
        if process.kind in OPERATORS:
            port = process.settings.get(f"{process.kind}.port", OPERATORS[process.kind])
            services[process.name]["ports"] = [_published(port, port)]
        if process.kind == "edge":
            port = int(process.settings.get("http.port", 8000)) + published
            services[process.name]["ports"] = [_published(port, 8000)]
            published += 1
        if process.kind == "engine":
            volumes["models"] = {}
    document = {
        "name": f"headwater-{fleet.namespace}",
        "services": services,
        "configs": configs,
        "volumes": volumes,
    }
    text: str = yaml.safe_dump(document, sort_keys=False, width=120)
    notes = [
        f"# Left out: {name}, which listens within its container only: set its host and a token file in the fleet's file.\n"
        for name in left_out
    ]
    return f"# Written by `headwater compose render`.\n{''.join(notes)}{text}"


def _published(port: int, inside: int) -> dict[str, Any]:
    """A container's port as one of this machine."""
    return {"target": inside, "published": str(port), "host_ip": "127.0.0.1"}


def _host_of(process: HostProcess) -> str:
    return str(process.settings.get(f"{process.kind}.host", "127.0.0.1"))


def _in_container(process: HostProcess, has_nats: bool) -> HostProcess:
    """A process whose addresses are those of containers: each listens on all of its own."""
    settings = dict(process.settings)
    settings.pop("nats.port", None)
    settings.pop("http.share_port", None)
    if has_nats:
        settings["nats.url"] = f"nats://nats:{NATS_PORT}"
    if process.kind == "edge":
        settings |= {"http.host": "0.0.0.0", "http.port": 8000}
    if process.kind not in ("admin", "console"):
        settings |= {"metrics.host": "0.0.0.0", "metrics.port": METRICS_PORT}
    return process._replace(settings=settings)


def _image(engine: str, registry: str, tag: str) -> str:
    """The image of an engine, "" for the one of everything else."""
    name = f"headwater-{engine.replace('_', '-')}" if engine else "headwater"
    return f"{registry}/{name}:{tag}" if registry else f"{name}:{tag}"


def _service(process: HostProcess, registry: str, tag: str, drain: int) -> dict[str, Any]:
    # An engine that loads nothing needs no packages of its own.
    loads = process.kind == "engine" and engine_registry.traits_of(process.engine).loads != "nothing"
    service: dict[str, Any] = {
        "image": _image(process.engine if loads else "", registry, tag),
        "command": ["headwater", process.kind, "--config", CONFIG_PATH, *process.after],
        "environment": {"HOME": "/tmp", "HEADWATER_CACHE_DIR": CACHE},
        "configs": [{"source": process.name, "target": CONFIG_PATH}],
        "restart": "unless-stopped",
        "stop_grace_period": f"{drain + STOP_MARGIN_S}s",
        "read_only": True,
        "tmpfs": ["/tmp", CACHE],
        "security_opt": ["no-new-privileges:true"],
        "cap_drop": ["ALL"],
    }
    if process.kind not in ("admin", "console"):
        service["healthcheck"] = {
            "test": ["CMD", "python3", "-c", LIVE],
            "interval": "10s",
            "start_period": "30s",
        }
    if process.references:
        service["environment"] |= {
            variable: f"${{{reference['env']}:?set it in the environment or in .env}}"
            for variable, reference in process.references.items()
            if "env" in reference
        }
    if process.kind == "engine":
        service["volumes"] = [f"models:{MODELS}"]
        service["environment"]["HF_HOME"] = MODELS
        service["shm_size"] = "8gb"
        service["stop_grace_period"] = f"{drain + 2 * STOP_MARGIN_S}s"
    if process.gpus:
        device = {"driver": "nvidia", "count": process.gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service
