"""A host's part of a fleet as units of systemd: template units for edges, routers and workers, an instance and a configuration file for each process.

    headwater.target ─┬─ headwater-nats.service
                      ├─ headwater-router@router-0.service    /etc/headwater/router-0.toml
                      ├─ headwater-edge@edge-0.service        /etc/headwater/edge-0.toml
                      └─ headwater-engine@worker-0.service    /etc/headwater/worker-0.toml

systemd starts each process again when it fails. A worker that was stopped by `headwater ctl stop` ends with 0 and stays down.
"""

import json
import shlex
from typing import Any, Final

from headwater.ops.launch import hosts
from headwater.ops.launch.fleet_file import FleetFile
from headwater.ops.launch.hosts import HostProcess, processes_of
from headwater.ops.nats import server as nats_server

CONFIG_DIR: Final = "/etc/headwater"
STATE_DIR: Final = "/var/lib/headwater"
STOP_MARGIN_S: Final = 30

NOTIFYING: Final = frozenset({"edge", "router", "engine"})
"""Kinds of processes that tell systemd when they are ready, and that their event loop runs."""

_HARDENING: Final = """NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectControlGroups=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictSUIDSGID=yes
LockPersonality=yes
UMask=0027
"""

_PROCESS: Final = """[Unit]
Description=Headwater {kind} %i
PartOf=headwater.target
After=network-online.target headwater-nats.service
Wants=network-online.target
StartLimitIntervalSec=300
StartLimitBurst=20

[Service]
Type={type}
{access}ExecStart={command} {kind} --config {config}/%i.toml
EnvironmentFile=-{config}/%i.env
User=headwater
Group=headwater
StateDirectory=headwater
CacheDirectory=headwater
WorkingDirectory={state}
{watchdog}TimeoutStartSec={start_s}
TimeoutStopSec={stop_s}
KillMode=mixed
Restart=on-failure
RestartSec=2
# Another start would fail in the same way.
RestartPreventExitStatus=2 3
SuccessExitStatus=143
LimitNOFILE=1048576
{more}{hardening}
[Install]
WantedBy=headwater.target
"""

_ENGINE: Final = """# NIXL and UCX register memory; CUDA and NCCL share it.
LimitMEMLOCK=infinity
"""

_TARGET: Final = """[Unit]
Description=Headwater: the part of a fleet that this host runs
Wants={units}
After=network-online.target

[Install]
WantedBy=multi-user.target
"""

_NATS: Final = """[Unit]
Description=NATS server of Headwater
PartOf=headwater.target
After=network-online.target
Wants=network-online.target

[Service]
Type=simple
ExecStart={binary} -c {config}/nats.conf
ExecReload=/bin/kill -s HUP $MAINPID
User=headwater
Group=headwater
StateDirectory=headwater
# As a lame duck it lets its clients go to the other servers before it ends.
ExecStop=/bin/kill -s USR2 $MAINPID
TimeoutStopSec=150
Restart=on-failure
RestartSec=2
LimitNOFILE=1048576
{hardening}
[Install]
WantedBy=headwater.target
"""


def render(fleet: FleetFile, host: str, *, command: str) -> dict[str, str]:
    """The units and configuration files of a host, by path below the root folder. Raises `ConfigError`."""
    drain = int(hosts.shared_settings(fleet).drain_timeout)
    processes = list(processes_of(fleet, host))
    files: dict[str, str] = {}
    units = []
    for kind in dict.fromkeys(process.kind for process in processes):
        files[f"etc/systemd/system/headwater-{kind}@.service"] = _unit(kind, command, drain)
    if host in fleet.nats_hosts:
        files["etc/systemd/system/headwater-nats.service"] = _NATS.format(
            binary=shlex.quote(_beside(command, "nats-server")), config=CONFIG_DIR, hardening=_HARDENING
        )
        files[f"{CONFIG_DIR[1:]}/nats.conf"] = nats_conf(fleet, host, f"{STATE_DIR}/jetstream")
        units.append("headwater-nats.service")
    for process in processes:
        units.append(f"headwater-{process.kind}@{process.name}.service")
        files[f"{CONFIG_DIR[1:]}/{process.name}.toml"] = process.config()
        environment = environment_file(process)
        if environment:
            files[f"{CONFIG_DIR[1:]}/{process.name}.env"] = environment
        if process.after:
            # They differ by instance, which a template cannot have.
            files[f"etc/systemd/system/headwater-{process.kind}@{process.name}.service.d/arguments.conf"] = (
                f"[Service]\nExecStart=\nExecStart={command} {process.kind} --config {CONFIG_DIR}/%i.toml "
                f"{' '.join(map(_quote, process.after))}\n"
            )
    files["etc/systemd/system/headwater.target"] = _TARGET.format(units=" ".join(units))
    return files


def _unit(kind: str, command: str, drain: int) -> str:
    is_engine = kind == "engine"
    return _PROCESS.format(
        kind=kind,
        type="notify" if kind in NOTIFYING else "exec",
        # Workers of some engines are forks of the unit's process.
        access="NotifyAccess=all\n" if is_engine else "",
        watchdog="WatchdogSec=60\n" if kind in NOTIFYING else "",
        command=command,
        config=CONFIG_DIR,
        state=STATE_DIR,
        # An engine may load its model for long.
        start_s="infinity" if is_engine else "120",
        stop_s=drain + STOP_MARGIN_S,
        more=_ENGINE if is_engine else "",
        hardening=_HARDENING,
    )


def _beside(command: str, program: str) -> str:
    folder, slash, _ = command.rpartition("/")
    return f"{folder}{slash}{program}" if slash else f"/usr/local/bin/{program}"


def _quote(word: str) -> str:
    """A word of ExecStart: systemd expands % and $ in it."""
    escaped = word.replace("%", "%%").replace("$", "$$")
    return json.dumps(escaped) if shlex.quote(escaped) != escaped else escaped


def environment_file(process: HostProcess) -> str:
    """The variables of a process that come from outside the fleet's file, for an administrator to fill."""
    lines = []
    for variable, reference in sorted(process.references.items()):
        kind, name = next(iter(reference.items()))
        where = f"the variable {name}" if kind == "env" else f"the file {name}"
        lines += [f"# The fleet's file says: the value of {where}.", f"{variable}="]
    return "\n".join(lines) + "\n" if lines else ""


def nats_conf(fleet: FleetFile, host: str, store: str) -> str:
    """The configuration of a host's NATS server. Raises `ConfigError`."""
    server = hosts.server_plan(fleet, host)
    config: dict[str, Any] = nats_server.loopback_config(server.port or fleet.nats.port, store)
    config |= server.settings
    return json.dumps(config, indent=2) + "\n"
