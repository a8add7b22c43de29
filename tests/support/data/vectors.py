"""Vectors for tests: a function of the prompt, an engine that gives them, and a fleet of production actors around it."""

import asyncio
from typing import Any

import msgspec
import numpy as np

from headwater.actors.edge.actor import EdgeActor
from headwater.engines.engine import RequestRejected
from headwater.engines.sim.engine import SimEngine
from headwater.ops.sim.network import SimConnection, SimHttpServer
from headwater.schemas.hashing import unpack_tokens
from headwater.schemas.inference import EmbedRequest
from headwater.schemas.tables import Capability
from tests.support.worlds.virtual import Stage, until

SIZE = 8
"""Dimensions of a vector unless a request wants fewer."""


def vector(prompt: bytes, size: int = SIZE) -> bytes:
    """A unit vector that depends on the prompt's tokens and on nothing else."""
    draw = np.random.default_rng(unpack_tokens(prompt).tolist())
    numbers = draw.normal(size=size)
    return (numbers / np.linalg.norm(numbers)).astype("<f4").tobytes()


class VectorEngine(SimEngine):
    """The simulated engine with vectors: `seconds` for each request, and what it was asked."""

    capabilities: frozenset[Capability] = SimEngine.capabilities | {"embed"}
    seconds = 0.05

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[EmbedRequest] = []
        self.cancelled: list[str] = []
        self.failure: Exception | None = None

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`."""
        self.asked.append(request)
        if request.dimensions > SIZE:
            raise RequestRejected(f"it has {SIZE} dimensions, not {request.dimensions}")
        if self.failure is not None:
            raise self.failure
        try:
            await self._clock.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled.append(request.request)
            raise
        return tuple(vector(prompt, request.dimensions or SIZE) for prompt in request.prompts)


class Edge:
    """An edge of a stage, with `more` of its arguments, and its clients' side."""

    def __init__(self, stage: Stage, name: str = "e1", **more: Any) -> None:
        self._process, self._world = stage.world(name)
        self._server = SimHttpServer(stage.fleet.network, stage.clock, name)
        self._process.on_kill(self._server.kill)
        self.actor = EdgeActor(self._world, name, self._server, drain_s=1.0, **more)

    async def start(self) -> None:
        """Until requests are taken."""
        self._process.start(self.actor.run(), "actor")
        await until(self.actor.ready.is_set, within_s=20.0)

    def send(self, path: str, body: Any = None, method: str = "") -> SimConnection:
        """Send a request and do not wait; a GET if there is no body, unless a method is given."""
        return self._server.connect(path, b"" if body is None else msgspec.json.encode(body), [], method)

    async def ask(self, path: str, body: Any = None, method: str = "") -> tuple[int, Any]:
        """Status and document of the answer."""
        return await answer_of(self.send(path, body, method))


async def answer_of(connection: SimConnection) -> tuple[int, Any]:
    """Status and document of an answer under way."""
    parts = []
    while (part := await connection.part()) is not None:
        parts.append(part)
    return connection.status, msgspec.json.decode(b"".join(parts))
