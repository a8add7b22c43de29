"""The picker's port: gRPC's health, with TLS and beside it without; ports that are taken; packages that are missing."""

import socket
import subprocess
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.actors.http.body import Bodies
from headwater.actors.picker.actor import Address, PickerServer
from headwater.actors.picker.pick import Picker
from headwater.ops.config.sections import PickerSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.start import edge as process
from headwater.ops.start.sockets import free_port

UNASKED = cast(Picker, None)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate and its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"
    files = ("-keyout", "tls.key", "-out", "tls.pem", "-days", "2", "-addext", "subjectAltName=DNS:localhost")
    subprocess.run([*command.split(), *files], cwd=folder, check=True, capture_output=True)
    return str(folder / "tls.pem"), str(folder / "tls.key")


async def status(channel: Any, service: str) -> int:
    """The health of a service."""
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return cast(int, answer.status)


async def test_health_over_tls_and_on_a_port_of_its_own(pair: tuple[str, str]) -> None:
    """Alive from the start, ready when it is said to be; both ports tell the same."""
    health_port = free_port(0)
    server = PickerServer(Address("127.0.0.1", 0, health_port, *pair), UNASKED, Bodies())
    port = await server.start()
    trusted = grpc.ssl_channel_credentials(Path(pair[0]).read_bytes())
    try:
        async with (
            grpc.aio.secure_channel(f"localhost:{port}", trusted) as secure,
            grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as plain,
        ):
            for channel in (secure, plain):
                assert await status(channel, "liveness") == SERVING
                assert await status(channel, "readiness") == NOT_SERVING
            await server.set_ready(ready=True)
            for channel in (secure, plain):
                for service in (
                    "readiness",
                    "envoy.service.ext_proc.v3.ExternalProcessor",
                    "inference-extension",
                    "",
                ):
                    assert await status(channel, service) == SERVING
    finally:
        await server.stop(0)


async def test_a_taken_port_is_named() -> None:
    """With the address, so that the operator knows which."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = PickerServer(Address("127.0.0.1", port), UNASKED, Bodies())
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            await server.start()
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--picker-port"):
            process.check_picker(PickerSettings(port=port))


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]) -> None:
    """Packages, with the command that installs them; one of certificate and key, with their flags."""
    with pytest.raises(ConfigError, match="--picker-tls-cert and --picker-tls-key"):
        process.check_picker(PickerSettings(tls_cert=pair[0]))
    monkeypatch.setattr(process, "PACKAGES", {"no_such_module": "some-package"})
    with pytest.raises(ConfigError, match=r"some-package is missing: pip install 'headwater\[picker\]'"):
        process.check_picker(PickerSettings())
