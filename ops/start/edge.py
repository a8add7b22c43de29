"""One edge, or one endpoint picker, as a process."""

import asyncio
import secrets
from importlib.util import find_spec
from pathlib import Path

from headwater.actors import metrics
from headwater.actors.edge.actor import EdgeActor
from headwater.actors.http.asgi import check_origins
from headwater.actors.http.server import BadCertificate, Certificate, UvicornServer
from headwater.actors.media.intake import MediaIntake
from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import PROBE_S, Ports
from headwater.engines import logs
from headwater.engines.transfer import media_transfer
from headwater.engines.transfer.port import TransferUnavailable
from headwater.ops.config.processes import EdgeProcess, PickerProcess
from headwater.ops.config.sections import PickerSettings, check_access
from headwater.ops.config.setting import ConfigError
from headwater.ops.start.actor import Host, run_one
from headwater.ops.start.sockets import bind
from headwater.ops.start.system import connections_possible


def certificate(
    chain: str, key: str, chain_flag: str = "--tls-cert", key_flag: str = "--tls-key"
) -> Certificate | None:
    """The certificate in these files, None without any. Raises `ConfigError` naming the flags."""
    if not chain and not key:
        return None
    if not (chain and key):
        raise ConfigError(f"TLS needs both a certificate and its key: give {chain_flag} and {key_flag}")
    try:
        return Certificate(Path(chain), Path(key))
    except BadCertificate as error:
        raise ConfigError(f"{chain_flag}, {key_flag}: {error}") from error


async def run_edge(settings: EdgeProcess, stop: asyncio.Event) -> int:
    """Run an edge until stopped. Raises `ConfigError` if its address is taken."""
    http = settings.http
    check_access(settings.auth, http.host)
    served_with = certificate(http.tls_cert, http.tls_key)
    try:
        check_origins(http.cors_origins)
    except ValueError as error:
        raise ConfigError(f"--cors-origins: {error}") from error
    listener = bind(http.host, http.port, share=http.share_port)
    connections = http.limits.connections
    connections = connections._replace(connections=connections_possible(connections.connections))
    name = settings.name or f"edge-{secrets.token_hex(3)}"
    logs.describe(edge=name)
    metrics.TENANTS.tenants_max = settings.edge.metrics_tenants
    try:
        transfer = settings.media_transfer
        open_media_transfer = media_transfer(name, transfer.mib, transfer.transport)
    except TransferUnavailable as error:
        raise ConfigError(f"--media-transfer: {error}") from error
    try:
        intake = MediaIntake(settings.media.fetch, settings.media.intake, settings.media.limits)
    except ValueError as error:
        raise ConfigError(f"--media-*: {error}") from error

    async def make(ports: Ports) -> Actor:
        # Each incarnation of the actor closes its own copy.
        server = UvicornServer(listener.dup(), connections, served_with)
        return EdgeActor(
            ports,
            name,
            server,
            settings.edge,
            drain_s=settings.drain_timeout,
            bodies=http.limits.bodies,
            probes=http.probes,
            access=settings.auth,
            probe_s=PROBE_S,
            cors_origins=http.cors_origins,
            intake=intake,
            open_media_transfer=open_media_transfer,
        )

    try:
        return await run_one(
            Host(settings.nats, settings.metrics, streams=settings.streams), "edge", name, make, stop
        )
    finally:
        await intake.close()


PACKAGES = {"grpc": "grpcio", "grpc_health": "grpcio-health-checking", "google.protobuf": "protobuf"}
"""What the picker needs besides Headwater: modules, and the packages that have them."""


async def run_picker(settings: PickerProcess, stop: asyncio.Event) -> int:
    """Run a picker until stopped. Raises `ConfigError`."""
    picker_settings = settings.picker
    check_picker(picker_settings)
    from headwater.actors.picker.actor import Address, PickerActor

    name = settings.name or f"picker-{secrets.token_hex(3)}"
    logs.describe(picker=name)
    address = Address(
        picker_settings.host,
        picker_settings.port,
        picker_settings.health_port,
        picker_settings.tls_cert,
        picker_settings.tls_key,
    )

    async def make(ports: Ports) -> Actor:
        return PickerActor(ports, name, address, access=settings.auth, drain_s=settings.drain_timeout)

    return await run_one(Host(settings.nats, settings.metrics), "picker", name, make, stop)


def check_picker(picker_settings: PickerSettings) -> None:
    """Raises `ConfigError` for a picker that could not be started with these settings."""
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} is missing: pip install 'headwater[picker]'")
    certificate(picker_settings.tls_cert, picker_settings.tls_key, "--picker-tls-cert", "--picker-tls-key")
    bind(picker_settings.host, picker_settings.port, "--picker-port").close()
    if picker_settings.health_port:
        bind(picker_settings.host, picker_settings.health_port, "--picker-health-port").close()
