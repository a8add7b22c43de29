"""An engine alone in a process of its own, called as a library, which is its own client: the baseline of the serving benchmark."""

import asyncio
import random
import time
from array import array
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection as Pipe
from typing import Any

from tests.bench.gpu.load import FIRST_ID, SYMBOLS, Load, Sample, run


class BareVllm:
    """vLLM's AsyncLLM."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def generate(self, prompt: list[int], tokens: int, request: str) -> AsyncIterator[int]:
        """Exactly so many tokens at temperature 0: the number of new ones, whenever some arrive."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        async for step in self._engine.generate({"prompt_token_ids": prompt}, sampling, request):
            yield len(step.outputs[0].token_ids)

    def stop(self) -> None:
        """End its processes."""
        self._engine.shutdown()


class BareSglang:
    """SGLang's Engine."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self._engine = Engine(**arguments)

    async def generate(self, prompt: list[int], tokens: int, request: str) -> AsyncIterator[int]:
        """As above."""
        sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        chunks = await self._engine.async_generate(
            input_ids=prompt, sampling_params=sampling, stream=True, rid=request
        )
        async for chunk in chunks:
            yield len(chunk["output_ids"])

    def stop(self) -> None:
        """End its processes."""
        self._engine.shutdown()


def serve(pipe: Pipe, start: type[BareVllm | BareSglang], arguments: dict[str, Any]) -> None:
    """Body of the process: sends the seconds of the start, then runs loads until it receives None."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(pipe, start, arguments))


async def _serve(pipe: Pipe, start: type[BareVllm | BareSglang], arguments: dict[str, Any]) -> None:
    began = time.perf_counter()
    engine = start(arguments)
    pipe.send(time.perf_counter() - began)
    loop = asyncio.get_running_loop()
    try:
        while (load := await loop.run_in_executor(None, pipe.recv)) is not None:

            async def request(number: int, draw: random.Random, load: Load = load) -> Sample:
                prompt = [FIRST_ID + draw.randrange(len(SYMBOLS)) for _ in range(load.prompt_tokens)]
                name = f"{load.seed}-{number}-{draw.random()}"
                began, tokens, came = time.monotonic(), 0, array("d")
                async for new in engine.generate(prompt, load.tokens, name):
                    came.append(time.monotonic())
                    tokens += new
                if tokens != load.tokens:
                    raise RuntimeError(f"asked {load}, got {tokens} tokens")
                return Sample(came[0] - began, time.monotonic() - began, tokens, came)

            pipe.send(await run(load, request))
    finally:
        engine.stop()
