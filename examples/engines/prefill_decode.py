"""An engine whose prompts may be computed by one worker and continued by another.

    headwater up --engine examples/engines/prefill_decode.py --prefill-workers 1 --decode-workers 1

`prefill` computes a prompt and keeps its KV until it is fetched or released; `generate` fetches it over TCP, once, and
only with the right prompt. Here the KV is a number that every further token depends on, so a wrong one would show.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

from headwater.engines.custom import EngineError, EngineInfo, EngineRequest, EngineSetup, Pinned

LEASE_S = 30.0


class Summing:
    """Two optional methods, `prefill` and `release`, declare the hand-off."""

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """A server for the KV that other workers fetch."""
        self.vocabulary = 250
        self.kept: dict[str, tuple[str, int]] = {}
        host = str(setup.options.get("host", "127.0.0.1"))
        self.server = await asyncio.start_server(self.serve, host, 0)
        self.address = (host, self.server.sockets[0].getsockname()[1])
        return setup.info()

    async def prefill(self, request: EngineRequest) -> Pinned:
        """Compute a prompt, and keep its KV under a key that cannot be guessed."""
        key = secrets.token_hex(16)
        self.kept[key] = (digest(request), await self.compute(request))
        asyncio.get_running_loop().call_later(LEASE_S, self.kept.pop, key, None)
        return Pinned(json.dumps([*self.address, key]).encode(), LEASE_S)

    async def release(self, request: str, params: bytes) -> None:
        """No worker will fetch it."""
        with contextlib.suppress(ValueError):
            self.kept.pop(json.loads(params)[2], None)

    async def generate(self, request: EngineRequest) -> AsyncIterator[int]:
        """Continue from the KV: fetched, or computed here."""
        kv = await self.fetch(request) if request.transfer else await self.compute(request)
        for number in range(request.sampling.max_tokens):
            await asyncio.sleep(0.0005)
            yield (kv + number) % self.vocabulary

    async def compute(self, request: EngineRequest) -> int:
        """The KV of a prompt: what takes an engine the time of a prefill."""
        return sum(request.tokens)

    async def fetch(self, request: EngineRequest) -> int:
        """The KV from the worker that has it. An `EngineError` ends the request, which is tried again without it."""
        assert request.transfer is not None
        try:
            host, port, key = json.loads(request.transfer.params)
            reader, writer = await asyncio.open_connection(host, port)
        except (ValueError, OSError) as error:
            raise EngineError(f"the prompt's KV cannot be fetched: {error}") from error
        try:
            writer.write(json.dumps([key, digest(request)]).encode() + b"\n")
            answer: Any = json.loads(await reader.readline() or b"null")
        finally:
            writer.close()
        if not isinstance(answer, int):
            raise EngineError("the prompt's KV is gone, or belongs to another prompt")
        return answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One fetch: the KV is given away once, to a worker that names its prompt."""
        try:
            key, prompt = json.loads(await reader.readline())
            kept, kv = self.kept.get(key, ("", None))
            if kept == prompt:
                del self.kept[key]
            writer.write(json.dumps(kv if kept == prompt else None).encode() + b"\n")
            await writer.drain()
        except (ValueError, OSError):
            # Not a worker's request: it gets no answer.
            pass
        finally:
            writer.close()

    async def stop(self) -> None:
        """No other worker fetches any more."""
        self.server.close()


def digest(request: EngineRequest) -> str:
    """Names a prompt for which a KV is valid."""
    return f"{request.lora_name}/{request.cache_salt}/{request.tokens}"
