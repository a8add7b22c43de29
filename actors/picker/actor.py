"""The endpoint picker as an actor: which endpoint serves a gateway's request, decided by the fleet's routers. With its gRPC server.

Subjects in
    the tables of leases, cards and API keys
Subjects out
    hw.<ns>.route.<pool>; hw.<ns>.wait.<pool>.<router>.<epoch>
State
    models with their tokenizers, endpoints of workers; nothing of a request beyond its stream, so all replicas are active
On lag
    requests wait for the router as an edge's do, in its queue, and are refused in the same cases
On loss of the log, or of NATS
    a request for which no router replies within the time of a search is refused with 503; the gateway may fail open
On failure
    streams end; the gateway's failure mode says what happens to their requests
On stop
    is not ready any more, accepts no streams, ends what is left after `drain_s` seconds

The server has Envoy's external processing, and the health of the picker as gRPC's health protocol has it.
"""

import asyncio
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from headwater.actors import metrics
from headwater.actors.edge.admit.control import AccessServices, wait_for_namespace_key
from headwater.actors.edge.catalog import ModelCatalog
from headwater.actors.edge.saga.fields import FieldChecker
from headwater.actors.edge.saga.http_call import DecisionSeal, Serving
from headwater.actors.edge.saga.record import OpenRequests
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.edge.settings import AccessSettings
from headwater.actors.http.body import Bodies
from headwater.actors.limits import DRAIN_TIMEOUT_S
from headwater.actors.picker import messages
from headwater.actors.picker.exchange import Exchange
from headwater.actors.picker.pick import Endpoints, Picker
from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import Ports
from headwater.schemas.names import host_port

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


class PickerActor(Actor):
    """See the module."""

    kind = "picker"

    def __init__(
        self,
        ports: Ports,
        name: str,
        address: Address,
        *,
        access: AccessSettings | None = None,
        drain_s: float = DRAIN_TIMEOUT_S,
    ) -> None:
        super().__init__(ports, name)
        self._drain_s = drain_s
        self._access = AccessServices(access or AccessSettings(), ports)
        self._models = ModelCatalog(ports)
        self._endpoints = Endpoints(ports.leases)
        self._seal = DecisionSeal(ports.secrets, ports.clock)
        self._models.is_live = self._endpoints.has_workers
        self._endpoints.on_pools_changed = self._models.refresh
        serving = Serving(
            WorkerRegistry(ports, name, self.spawn),
            self._models,
            # The edge accounts for the request: nothing is written here.
            OpenRequests(ports.requests, ports.ns, name, 0, ports.clock),
            FieldChecker(),
            salts=self._access.control.salts,
        )
        picker = Picker(serving, self._access.control, self._endpoints, self._seal)
        self._server = PickerServer(address, picker, Bodies())
        self.port = 0

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        return {
            "state": "draining" if self.stopping else "ready" if self.ready.is_set() else "starting",
            "models": [model.card.name for model in self._models.all()],
            "endpoints": len(self._endpoints.of_pool("")),
        }

    async def start(self) -> None:
        """See `Actor.start`."""
        self.spawn(self._models.run(), "models")
        self.spawn(self._endpoints.run(), "leases")
        for loop, name in self._access.loops():
            self.spawn(loop, name)
        # Alive from now on, and ready once it knows the fleet.
        self.port = await self._server.start()
        await self._access.prepare()
        self._seal.derive(await wait_for_namespace_key(self.ports.secrets, self.ports.clock))
        await self._models.known.wait()
        await self._endpoints.known.wait()
        await self._server.set_ready(ready=True)
        self.log.info("picker_listening", port=self.port, endpoints=len(self._endpoints.of_pool("")))

    async def drain(self) -> None:
        """See `Actor.drain`."""
        self.log.info("draining")
        await self._server.set_ready(ready=False)
        await self._server.stop(self._drain_s)

    async def close(self) -> None:
        """See `Actor.close`."""
        await self._server.stop(0.0)
