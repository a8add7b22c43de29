"""An AsyncLLM alone, called as a library: the baseline of the serving benchmark."""

import asyncio
import random
import time
from array import array
from multiprocessing.connection import Connection as Pipe
from typing import Any

from headwater.ops.bench.gpu.load import FIRST_ID, SYMBOLS, Load, Sample, run


def bare(pipe: Pipe, arguments: dict[str, Any]) -> None:
    """Body of a process with an AsyncLLM: sends the seconds of its start, then runs loads until it receives None."""
    asyncio.run(_bare(pipe, arguments))


async def _bare(pipe: Pipe, arguments: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.perf_counter()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    pipe.send(time.perf_counter() - began)
    loop = asyncio.get_running_loop()
    try:
        while (load := await loop.run_in_executor(None, pipe.recv)) is not None:
            sampling = SamplingParams(
                max_tokens=load.tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )

            async def request(
                number: int, draw: random.Random, load: Load = load, sampling: Any = sampling
            ) -> Sample:
                prompt = {
                    "prompt_token_ids": [
                        FIRST_ID + draw.randrange(len(SYMBOLS)) for _ in range(load.prompt_tokens)
                    ]
                }
                began, tokens, came = time.monotonic(), 0, array("d")
                async for step in engine.generate(prompt, sampling, f"{load.seed}-{number}-{draw.random()}"):
                    came.append(time.monotonic())
                    tokens += len(step.outputs[0].token_ids)
                return Sample(came[0] - began, time.monotonic() - began, tokens, came)

            pipe.send(await run(load, request))
    finally:
        engine.shutdown()
