"""One endpoint picker as a process."""

import asyncio
import secrets
from importlib.util import find_spec

from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.persistence import Ports
from headwater.engines import logs
from headwater.ops.config.picker import PickerSettings
from headwater.ops.config.processes import PickerProcess
from headwater.ops.config.setting import ConfigError
from headwater.ops.process.actor import Host, run_one
from headwater.ops.process.edge import certificate
from headwater.ops.process.sockets import bind

PACKAGES = {"grpc": "grpcio", "grpc_health": "grpcio-health-checking", "google.protobuf": "protobuf"}
"""What the picker needs besides Headwater: modules, and the packages that have them."""


async def run_picker(settings: PickerProcess, stop: asyncio.Event) -> int:
    """Run a picker until stopped. Raises `ConfigError`."""
    own = settings.picker
    check_picker(own)
    from headwater.actors.picker.actor import PickerActor
    from headwater.actors.picker.server import Address

    name = settings.name or f"picker-{secrets.token_hex(3)}"
    logs.describe(picker=name)
    address = Address(own.host, own.port, own.health_port, own.tls_cert, own.tls_key)

    async def make(ports: Ports) -> Actor:
        return PickerActor(ports, name, address, access=settings.auth, drain_s=settings.drain_timeout)

    return await run_one(Host(settings.nats, settings.metrics), "picker", name, make, stop)


def check_picker(own: PickerSettings) -> None:
    """Raises `ConfigError` for a picker that could not be started with these settings."""
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} is missing: pip install 'headwater[picker]'")
    certificate(own.tls_cert, own.tls_key, "--picker-tls-cert", "--picker-tls-key")
    bind(own.host, own.port, "--picker-port").close()
    if own.health_port:
        bind(own.host, own.health_port, "--picker-health-port").close()
