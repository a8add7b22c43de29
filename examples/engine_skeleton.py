"""The smallest engine adapter: every answer is the token 7.

    python examples/engine_skeleton.py

`EngineBase` rejects what is not implemented (LoRA, sleep, pause, hand-off, embeddings) by the name of its capability. A real adapter replaces
`_generate` by its engine's loop, and reports KV events, so that the router knows what is cached.
"""

import asyncio
from collections.abc import AsyncIterator

from headwater.engines.engine import (
    Emit,
    EngineBase,
    EngineInfo,
    EngineLoad,
    KvEvent,
    RequestRejected,
    Step,
    Transfer,
)
from headwater.schemas.events import BlocksStored
from headwater.schemas.inference import GenerateRequest, Sampling
from headwater.schemas.tables import Capability

TOKEN = 7
TOKEN_S = 0.01
CONTEXT = 4096


class ConstantEngine(EngineBase):
    """See `headwater.engines.engine.Engine`."""

    name = "constant"
    capabilities: frozenset[Capability] = frozenset({"generate"})

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> EngineInfo:
        """Nothing to load."""
        return EngineInfo(
            model="constant", block_size=16, total_blocks=256, max_running=8, context_length=CONTEXT
        )

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """Start a task that emits one step per token. `emit` must not be called before this returns."""
        self._check_supported(request)
        if len(request.tokens) // 4 + request.sampling.max_tokens > CONTEXT:
            raise RequestRejected(f"prompt and answer exceed {CONTEXT} tokens", param="max_tokens")
        self._running[request.request] = asyncio.create_task(self._generate(request, emit))

    async def _generate(self, request: GenerateRequest, emit: Emit) -> None:
        try:
            for number in range(request.sampling.max_tokens):
                await asyncio.sleep(TOKEN_S)
                last = number + 1 == request.sampling.max_tokens
                emit(Step((TOKEN,), finish="length" if last else "", cached_tokens=0 if number == 0 else -1))
        except asyncio.CancelledError:
            # Exactly one step with a `finish` per request, also after an abort.
            emit(Step((), finish="abort"))
        finally:
            self._running.pop(request.request, None)

    def abort(self, request: str) -> None:
        """Stop soon; unknown ids are ignored."""
        task = self._running.get(request)
        if task is not None:
            task.cancel()

    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """No cache, so no events: the router then credits the worker with the prompts dispatched to it."""
        await asyncio.Event().wait()
        yield []

    def held_blocks(self) -> list[BlocksStored]:
        """Nothing is cached."""
        return []

    def load(self) -> EngineLoad:
        """Requests running and waiting, blocks used and in total."""
        return EngineLoad(len(self._running), 0, 0, 256)

    async def clear_kv(self) -> None:
        """Nothing to clear."""

    async def check(self) -> None:
        """Return if the engine is alive; a real one raises `EngineDied`."""

    async def stop(self) -> None:
        """End all requests and the engine."""
        for task in list(self._running.values()):
            task.cancel()


async def main() -> None:
    """Run two requests and abort the second."""
    engine = ConstantEngine()
    await engine.start()
    print("capabilities:", ", ".join(sorted(engine.capabilities)))
    for number, count in enumerate((4, 400)):
        done = asyncio.Event()
        steps: list[Step] = []

        def emit(
            step: Step, steps: list[Step] = steps, done: asyncio.Event = done, number: int = number
        ) -> None:
            steps.append(step)
            if number == 1 and not step.finish:
                engine.abort("request-1")
            if step.finish:
                done.set()

        prompt = (1).to_bytes(4, "little")
        engine.submit(
            GenerateRequest(f"request-{number}", "edge", 1, prompt, Sampling(max_tokens=count)), emit
        )
        await done.wait()
        print("tokens:", *(token for step in steps for token in step.tokens), f"({steps[-1].finish})")
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
