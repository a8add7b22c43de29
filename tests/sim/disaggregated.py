"""A simulated fleet on virtual time whose workers prefill, decode or do both, and requests to its edge."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Final

import msgspec

from headwater.engines.sim.engine import SimSettings
from headwater.ops.sim.fleet import SETTINGS, SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.ops.sim.network import SimConnection
from headwater.schemas.events import Role
from headwater.schemas.inference import Choreography

EDGE: Final = "edge-0"
SPLIT: Final[tuple[Role, ...]] = ("prefill", "decode")
JOINED_S: Final = 2.0


@asynccontextmanager
async def serving(fleet: SimFleet) -> AsyncIterator[None]:
    """All of a fleet has joined. In the end all are killed."""
    try:
        for name in fleet.names:
            fleet.start(name)
        await asyncio.sleep(JOINED_S)
        yield
    finally:
        for name in fleet.names:
            await fleet.kill(name)


@asynccontextmanager
async def fleet_of(
    clock: VirtualLoop,
    how: Choreography = "returned",
    roles: Sequence[Role] = SPLIT,
    settings: SimSettings = SETTINGS,
    *,
    revisions: Sequence[str] = (),
    own_settings: Mapping[str, SimSettings] = MappingProxyType({}),
) -> AsyncIterator[SimFleet]:
    """A fleet that serves: a worker for each role, one router, one edge. All are killed at the end.

    `revisions` are those of the workers, in order; `own_settings` are by their names.
    """
    names = [f"{role}-{number}" for number, role in enumerate(roles)]
    quiet = random.Random(3)
    fleet = SimFleet(
        clock, quiet, lambda *_: None, names, ["router-0"], [EDGE], roles, how, settings=settings
    )
    fleet.revisions = dict(zip(names, revisions, strict=False))
    fleet.own_settings = dict(own_settings)
    async with serving(fleet):
        yield fleet


def begin(fleet: SimFleet, prompt: Sequence[int], tokens: int = 4, **fields: Any) -> SimConnection:
    """Send a completion request; the client may hang up."""
    body = {"model": "sim", "prompt": list(prompt), "max_tokens": tokens, "seed": 1, "ignore_eos": True}
    return fleet.servers[EDGE].connect("/v1/completions", msgspec.json.encode(body | fields), [])


async def answer(connection: SimConnection) -> Any:
    """The whole body of a response, as JSON."""
    data = b""
    while (part := await connection.part()) is not None:
        data += part
    return msgspec.json.decode(data)


async def ask(fleet: SimFleet, prompt: Sequence[int], tokens: int = 4, **fields: Any) -> Any:
    """One request and its answer."""
    return await answer(begin(fleet, prompt, tokens, **fields))


async def get(fleet: SimFleet, path: str) -> tuple[int, Any]:
    """Status and document of a page of the edge."""
    connection = fleet.servers[EDGE].connect(path, b"", [])
    document = await answer(connection)
    return connection.status, document


def cached_tokens(document: Any) -> int:
    """What the client is told of its prompt's cached part."""
    found: int = document["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found
