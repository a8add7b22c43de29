"""The gRPC server of a picker: Envoy's external processing, and the health of the picker as gRPC's health protocol has it."""

import asyncio
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from headwater.actors import metrics
from headwater.actors.http.body import Bodies
from headwater.actors.picker import messages
from headwater.actors.picker.exchange import Exchange
from headwater.actors.picker.pick import Picker
from headwater.schemas.addresses import host_port

LIVENESS: Final = "liveness"
READINESS: Final = ("readiness", messages.SERVICE, "inference-extension", "")
"""The names under which gateways and orchestrators ask whether the picker is ready; "": for the whole server."""

MESSAGE_BYTES_MAX: Final = 4 << 20
"""Room for what a message has besides its body."""


class Address(NamedTuple):
    """Where a picker listens. `health_port` has health alone, and without TLS, as Kubernetes probes it; 0: none.

    `certificate` and `key` are files, PEM; "": without TLS.
    """

    host: str
    port: int
    health_port: int = 0
    certificate: str = ""
    key: str = ""


class PickerServer:
    """See the module. The picker answers once `start` was called, and is ready once `set_ready` was."""

    def __init__(self, address: Address, picker: Picker, bodies: Bodies) -> None:
        self._address = address
        self._health = health.HealthServicer()
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", bodies.limits.bytes_max + MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", -1),
        ]
        self._servers = [grpc.aio.server(options=options)]
        method = grpc.stream_stream_rpc_method_handler(
            _Processor(picker, bodies).process,
            request_deserializer=messages.ProcessingRequest.FromString,
            response_serializer=messages.ProcessingResponse.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler(messages.SERVICE, {messages.METHOD: method})
        self._servers[0].add_generic_rpc_handlers((service,))
        if address.health_port:
            self._servers.append(grpc.aio.server(options=options[:1]))
        for server in self._servers:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    async def start(self) -> int:
        """Listen; returns the port. Raises `OSError` if an address is taken."""
        address = self._address
        await self._set(health_pb2.HealthCheckResponse.SERVING, LIVENESS)
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING, *READINESS)
        where = host_port(address.host, address.port)
        try:
            if address.certificate:
                pair = Path(address.key).read_bytes(), Path(address.certificate).read_bytes()
                credentials = grpc.ssl_server_credentials([pair])
                port: int = self._servers[0].add_secure_port(where, credentials)
            else:
                port = self._servers[0].add_insecure_port(where)
            for server in self._servers[1:]:
                server.add_insecure_port(host_port(address.host, address.health_port))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {where}: {error}") from error
        for server in self._servers:
            await server.start()
        return port

    async def set_ready(self, *, ready: bool) -> None:
        """Say whether requests should be sent here."""
        response = health_pb2.HealthCheckResponse
        await self._set(response.SERVING if ready else response.NOT_SERVING, *READINESS)

    async def stop(self, grace_s: float) -> None:
        """Accept no requests any more, and end those that are left after `grace_s` seconds."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    async def _set(self, status: int, *services: str) -> None:
        for service in services:
            await self._health.set(service, status)


class _Processor:
    """One stream per request of a gateway."""

    def __init__(self, picker: Picker, bodies: Bodies) -> None:
        self._picker = picker
        self._bodies = bodies

    async def process(self, _: object, context: Any) -> None:
        """Answer a stream. Reading and writing by hand takes two thirds of the time that iterators take."""
        exchange = Exchange(self._picker, self._bodies)
        aborted = True
        metrics.PICKER_STREAMS.inc()
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                for answer in await exchange.take(message):
                    await context.write(answer)
            aborted = False
        finally:
            metrics.PICKER_STREAMS.dec()
            exchange.end(aborted=aborted)
