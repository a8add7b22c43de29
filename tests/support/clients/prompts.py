"""What an engine is given, read off the bus: the prompt's token ids as an edge sends them to a worker."""

import asyncio
from typing import Any

import msgspec
import nats
from nats.aio.client import Client

from headwater.schemas.hashing import unpack_tokens
from headwater.schemas.inference import GenerateRequest
from tests.support.processes.fleet import FleetProcess

_generate = msgspec.msgpack.Decoder(GenerateRequest)


async def sent(up: FleetProcess, path: str, body: dict[str, Any]) -> tuple[list[int], int]:
    """The prompt that a request becomes, and what the answer says of its length."""
    found: asyncio.Queue[list[int]] = asyncio.Queue()
    bus: Client = await nats.connect(up.nats)

    async def on_message(message: Any) -> None:
        if message.subject.endswith(".generate"):
            found.put_nowait(unpack_tokens(_generate.decode(message.data).tokens).tolist())

    try:
        await bus.subscribe("hw.default.engine.>", cb=on_message)
        await bus.flush()
        async with up.client() as client:
            answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        async with asyncio.timeout(10):
            return await found.get(), answer.json()["usage"]["prompt_tokens"]
    finally:
        await bus.close()
