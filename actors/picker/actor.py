"""The endpoint picker as an actor: which endpoint serves a gateway's request, decided by the fleet's routers.

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
"""

from typing import Any

from headwater.actors.edge.admit.control import AccessServices
from headwater.actors.edge.model.catalog import ModelCatalog
from headwater.actors.edge.saga.context import Serving
from headwater.actors.edge.saga.fields import FieldChecker
from headwater.actors.edge.saga.open_requests import OpenRequests
from headwater.actors.edge.saga.picked import DecisionSeal
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.edge.settings import AccessSettings
from headwater.actors.http.body import Bodies
from headwater.actors.picker.endpoints import Endpoints
from headwater.actors.picker.pick import Picker
from headwater.actors.picker.server import Address, PickerServer
from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.persistence import Ports
from headwater.actors.runtime.settings import DRAIN_TIMEOUT_S
from headwater.events.ports import LogError

SECRET_RETRY_S = 0.5


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
        await self._load_seal()
        await self._models.known.wait()
        await self._endpoints.known.wait()
        await self._server.set_ready(ready=True)
        self.log.info("picker_listening", port=self.port, endpoints=len(self._endpoints.of_pool("")))

    async def _load_seal(self) -> None:
        while True:
            try:
                await self._seal.load()
                return
            except LogError as error:
                self.log.warning("namespace_key_not_read", reason=str(error))
                await self.ports.clock.sleep(SECRET_RETRY_S)

    async def drain(self) -> None:
        """See `Actor.drain`."""
        self.log.info("draining")
        await self._server.set_ready(ready=False)
        await self._server.stop(self._drain_s)

    async def close(self) -> None:
        """See `Actor.close`."""
        await self._server.stop(0.0)
