"""One vLLM engine in a process of its own, for the hand-off benchmark."""

import asyncio
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.gpu.model import LOAD_FORMAT, WEIGHTS_EXTENSION

REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters with which a prefill engine pins a prompt's blocks and returns their location."""


class EngineTransfer(NamedTuple):
    """One transfer, as measured by NIXL: total seconds, seconds of posting, bytes, descriptors."""

    seconds: float
    post_s: float
    size: int
    descriptors: int


class BenchRequest(NamedTuple):
    """A request to the engine. `alternatives`: log probabilities of so many tokens at each place, 0 for none."""

    tokens: list[int]
    max_tokens: int
    kv: dict[str, Any] | None = None
    alternatives: int = 0


DIGESTS = "digests"
"""Sent instead of an `BenchRequest`; the reply is `Extension.kv_digests`."""


class EngineAnswer(NamedTuple):
    """The result of a request. `transfers` are those that ended since the previous one.

    `logprobs` has the log probabilities of the likeliest tokens at each place, if they were asked for.
    """

    tokens: tuple[int, ...]
    kv: dict[str, Any] | None
    first_s: float
    total_s: float
    cached: int
    transfers: list[EngineTransfer]
    logprobs: tuple[dict[int, float], ...] = ()


class Up(NamedTuple):
    """Sent when the engine is ready."""

    seconds: float
    blocks: int
    block_size: int


def serve(pipe: Connection, arguments: dict[str, Any], connector: dict[str, Any]) -> None:
    """Body of the process: start vLLM, send `Up`, reply to each `BenchRequest` with an `EngineAnswer` until None."""
    asyncio.run(_serve(pipe, arguments, connector))


async def _serve(pipe: Connection, arguments: dict[str, Any], connector: dict[str, Any]) -> None:
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    transfers: list[EngineTransfer] = []

    class Collect(StatLoggerBase):
        """Collects NIXL's figures from the engine's statistics."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            data = getattr(scheduler_stats, "kv_connector_stats", None)
            transfers.extend(_transfers(data) if data else ())

        def log_engine_initialized(self) -> None:
            pass

    began = time.perf_counter()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments, kv_transfer_config=KVTransferConfig(**connector)), stat_loggers=[Collect]
    )
    cache = engine.vllm_config.cache_config
    pipe.send(Up(time.perf_counter() - began, int(cache.num_gpu_blocks), int(cache.block_size)))
    loop = asyncio.get_running_loop()
    number = 0
    try:
        while (asked := await loop.run_in_executor(None, pipe.recv)) is not None:
            if asked == DIGESTS:
                pipe.send((await engine.collective_rpc("kv_digests"))[0])
                continue
            number += 1
            answer = await _generate(engine, asked, f"r{number}-{time.time_ns()}")
            pipe.send(answer._replace(transfers=list(transfers)))
            transfers.clear()
    finally:
        engine.shutdown()


def _transfers(data: dict[str, Any]) -> list[EngineTransfer]:
    columns = ("transfer_duration", "post_duration", "bytes_transferred", "num_descriptors")
    # Newer versions wrap the figures.
    values = data if columns[0] in data else data.get("data", {})
    return [EngineTransfer(*row) for row in zip(*(values.get(name, ()) for name in columns))]


async def _generate(engine: Any, asked: BenchRequest, request: str) -> EngineAnswer:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": asked.kv} if asked.kv else None
    sampling = SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        extra_args=extra,
        logprobs=asked.alternatives or None,
    )
    began, first_s = time.perf_counter(), 0.0
    output: Any = None
    async for step in engine.generate({"prompt_token_ids": asked.tokens}, sampling, request):
        first_s = first_s or time.perf_counter() - began
        output = step
    if output is None:
        raise RuntimeError("vLLM returned no output")
    total_s = time.perf_counter() - began
    answer = output.outputs[0]
    logprobs = tuple(
        {token: entry.logprob for token, entry in place.items()} for place in answer.logprobs or ()
    )
    return EngineAnswer(
        tuple(answer.token_ids),
        output.kv_transfer_params,
        first_s,
        total_s,
        output.num_cached_tokens or 0,
        [],
        logprobs,
    )


def arguments(
    model: Path, device: str, block_size: int, context: int, *, eager: bool, kv_gb: float
) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`, the same for prefill and decode. `kv_gb` of KV cache, so that several fit."""
    given: dict[str, Any] = {
        "model": str(model),
        "load_format": LOAD_FORMAT,
        "worker_extension_cls": WEIGHTS_EXTENSION,
        "seed": 0,
        "block_size": block_size,
        "max_model_len": context,
        "enable_prefix_caching": True,
        "enforce_eager": eager,
        "kv_cache_memory_bytes": int(kv_gb * 1e9),
        "disable_log_stats": False,
    }
    if device == "cpu":
        given["dtype"] = "float32"
    else:
        # Only a check at the start: free memory does not matter when the cache's size is given.
        given["gpu_memory_utilization"] = 0.1
    return given
