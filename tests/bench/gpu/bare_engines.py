"""The engines that run alone: vLLM's AsyncLLM and SGLang's Engine, called as libraries."""

from collections.abc import AsyncIterator
from multiprocessing.connection import Connection as Pipe
from typing import Any

from tests.bench.gpu import bare


def vllm(pipe: Pipe, arguments: dict[str, Any]) -> None:
    """Body of a process: see `bare.serve`. `arguments` are those of AsyncEngineArgs."""
    bare.serve(pipe, BareVllm, arguments)


def sglang(pipe: Pipe, arguments: dict[str, Any]) -> None:
    """Body of a process: see `bare.serve`. `arguments` are those of Engine."""
    bare.serve(pipe, BareSglang, arguments)


class BareVllm:
    """See `bare.BareEngine`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def generate(self, prompt: list[int], tokens: int, request: str) -> AsyncIterator[int]:
        """See `BareEngine.generate`."""
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
        """See `bare.BareEngine.stop`."""
        self._engine.shutdown()


class BareSglang:
    """See `bare.BareEngine`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self._engine = Engine(**arguments)

    async def generate(self, prompt: list[int], tokens: int, request: str) -> AsyncIterator[int]:
        """See `BareEngine.generate`."""
        sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        chunks = await self._engine.async_generate(
            input_ids=prompt, sampling_params=sampling, stream=True, rid=request
        )
        async for chunk in chunks:
            yield len(chunk["output_ids"])

    def stop(self) -> None:
        """See `bare.BareEngine.stop`."""
        self._engine.shutdown()
