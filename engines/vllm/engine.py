"""vLLM's AsyncLLM as an `Engine`: tokens in, tokens out."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from headwater.engines import process
from headwater.engines.engine import (
    AnswerStream,
    Emit,
    EncodedImage,
    EngineInfo,
    EngineLoad,
    EngineUnavailable,
    Finish,
    Step,
    Transfer,
    Unusable,
    check_length,
    check_processors,
    seal,
    unseal,
)
from headwater.engines.logs import failure_place
from headwater.engines.native_arguments import number
from headwater.engines.process import freeze_heap, interruptible
from headwater.engines.ranked import default_sampling
from headwater.engines.vllm import handoff, sampling
from headwater.engines.vllm.config import VllmSettings, capabilities, pooling_of
from headwater.engines.vllm.encoder import VllmEmbeddings
from headwater.engines.vllm.launch import check_alive, death_of, import_vllm, launch, of_engine, shut_down
from headwater.engines.vllm.media import (
    media_prompt,
    media_settings,
    media_support,
    media_tokens_max,
    speech_prompt,
    speech_support,
)
from headwater.engines.vllm.operations import Loras, VllmControl
from headwater.engines.vllm.sampling import rejection_of
from headwater.schemas import hashing
from headwater.schemas.inference import GenerateRequest, TokenLogprob
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import LOGPROBS_MAX, Capability, EmbeddingSupport, SpeechSupport

OnStats = Callable[[Any, int], None]
"""Called with the scheduler's statistics (vLLM's SchedulerStats) and the data-parallel rank, once per step."""


def stat_loggers(on_stats: OnStats, *, prometheus: bool) -> list[Any]:
    """The `stat_loggers` for AsyncLLM.

    With custom loggers it collects statistics even where `disable_log_stats` is set, and adds its Prometheus logger
    unless one of the custom ones is a Prometheus logger; `NoPrometheus` prevents that.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

    class LoadLogger(StatLoggerBase):
        """Passes the scheduler's statistics on."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._rank = engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                on_stats(scheduler_stats, self._rank)

        def log_engine_initialized(self) -> None:
            pass

    class NoPrometheus(PrometheusStatLogger):
        """Replaces vLLM's, which computes several hundred unused values per step."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            self.engine_indexes = engine_indexes or [0]

        def record(self, *_: Any, **__: Any) -> None:
            pass

        def record_sleep_state(self, *_: Any, **__: Any) -> None:
            pass

        def record_admission_rejection(self, *_: Any, **__: Any) -> None:
            pass

        def log(self) -> None:
            pass

        def log_engine_initialized(self) -> None:
            pass

    return [LoadLogger] if prometheus else [LoadLogger, NoPrometheus]


WORKER_EXTENSION = "headwater.engines.vllm.worker_extension.Extension"
FINISHES: dict[str | None, Finish] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "repetition": "stop",
}

_log = structlog.get_logger("headwater.vllm")


class VllmEngine(VllmControl):
    """See `headwater.engines.engine.Engine` and, for data-parallel ranks, `headwater.engines.ranked`."""

    # Until it is started; then set from vLLM's configuration.
    capabilities: frozenset[Capability] = frozenset()

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__()
        self._settings = settings
        self.ranks = number(settings.options.native, "data_parallel_size", 1)
        self._folder: Path | None = None
        self._handoffs: handoff.VllmHandoffs | None = None
        self._embeddings: VllmEmbeddings | None = None
        self._speech: SpeechSupport | None = None

    async def start(self) -> EngineInfo:
        """See `Engine.start`. Loads for seconds to minutes on this thread, on which nothing else runs yet."""
        # No other user can listen in it.
        self._folder = process.take("engine")
        worker_settings, processors = self._settings.worker, self._settings.options.logits_processors
        if worker_settings.reads_embeddings:
            self._embeddings = VllmEmbeddings(worker_settings.embeddings_mib)
        with interruptible():
            version = import_vllm(self._folder)
            loggers = stat_loggers(self._record, prometheus=worker_settings.exports_metrics)
            self._engine, self._failure_file = launch(self._settings, self._folder, self._complete, loggers)
        config = self._engine.vllm_config
        if config.observability_config.otlp_traces_endpoint is not None:
            self._traces = worker_settings.traces
        self._ranks = of_engine(self._engine, self.ranks)
        self._context_length = int(config.model_config.max_model_len)
        tasks = await self._engine.get_supported_tasks()
        self._pooling = pooling_of(tasks, config.model_config.hf_config)
        self.capabilities = capabilities(config, tasks, processors, self._engine)
        if "handoff" in self.capabilities:
            self._handoffs = handoff.VllmHandoffs(config)
        self._media = media_support(config)
        self.capabilities |= self._media.capabilities
        if self._media.placeholders and self._embeddings is not None:
            await self._embeddings.verify(self._engine, self._media)
            self.capabilities |= {"image_embeddings"}
        if "transcription" in self.capabilities:
            self._speech = speech_support(config)
        lora = config.lora_config
        self._loras = Loras(
            self._engine,
            (lora.max_cpu_loras or lora.max_loras) if lora else 0,
            lora.max_lora_rank if lora else 0,
            self.clear_kv,
        )
        freeze_heap()
        return EngineInfo(
            self._settings.files.name,
            int(config.cache_config.block_size),
            self._ranks[0].idle.total_blocks,
            int(config.scheduler_config.max_num_seqs),
            self._context_length,
            version=version,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            pairs_with=handoff.pairs_with(config, self._settings.files.name, version),
            lora_slots=self._loras.slots,
            lora_rank_max=self._loras.rank_max,
            tasks=self._pooling.tasks,
            processors=tuple(sorted(processors)) if "processors" in self.capabilities else (),
            vocabulary=int(config.model_config.get_vocab_size()),
            logprobs_max=_logprobs_max(config.model_config.max_logprobs),
            media=self._media,
            media_settings=media_settings(config),
            media_tokens_max=media_tokens_max(self._engine, self._media),
            speech=self._speech,
            image_embeddings=self._taken_embeddings(),
            default_sampling=default_sampling(config.model_config.get_diff_sampling_param()),
        )

    def _taken_embeddings(self) -> EmbeddingSupport | None:
        """Return the embeddings that clients may send. Raises `EngineUnavailable` if they should be able to, and the model needs the images too."""
        if not self._settings.worker.accepts_embeddings:
            return None
        if self._embeddings is None or self._embeddings.taken is None:
            raise EngineUnavailable(
                f"{self._settings.files.name} cannot take embeddings in place of images: start it without --accept-image-embeds"
            )
        return self._embeddings.taken

    def _complete(self, arguments: dict[str, Any]) -> None:
        """Arguments that follow from other settings."""
        if self._embeddings is not None:
            arguments |= self._embeddings.arguments()
        if processors := self._settings.options.logits_processors:
            arguments["logits_processors"] = list(processors.values())
        # A configured extension is kept; unfetched blocks are then freed only when their lease expires.
        if not arguments.get("worker_extension_cls"):
            arguments["worker_extension_cls"] = WORKER_EXTENSION

    def _record(self, stats: Any, number: int) -> None:
        """Load of the rank that vLLM counts as engine `number`, from its scheduler's statistics."""
        at = next((rank for rank in self._ranks if rank.number == number), None)
        if at is not None:
            total = at.idle.total_blocks
            used = round(stats.kv_cache_usage * total)
            at.last = EngineLoad(stats.num_running_reqs, stats.num_waiting_reqs, used, total)

    def submit(
        self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None, *, rank: int = 0
    ) -> None:
        """See `Engine.submit`."""
        self._require("generate" if self._speech is None else "transcription")
        check_alive(self._engine, self._failure_file)
        self._check_supported(request)
        tokens = hashing.unpack_tokens(request.tokens)
        request_sampling = request.sampling
        check_length(len(tokens), request_sampling.max_tokens, self._context_length)
        check_processors(request_sampling.processors, self._settings.options.logits_processors)
        prompt = self._prompt(request, tokens.tolist())
        lora = self._loras.request(request.lora_name)
        stream = AnswerStream(request, emit)
        loop = asyncio.get_running_loop()
        try:
            params = self._params(request, transfer, rank)
        except Unusable as error:
            loop.call_soon(emit, Step((), "error", detail=f"the hand-off is invalid: {error}"))
            return
        task = loop.create_task(
            self._generate(request, prompt, params, lora, rank, stream),
            name=f"generate {request.request}",
        )
        self._tasks[request.request] = task
        self._ranks[rank].running.add(request.request)
        if self._embeddings is not None:
            store = self._embeddings.store
            pinned = store.pin(request.media)
            # What ended otherwise the engine may still have.
            task.add_done_callback(
                lambda _: store.unpin(pinned, was_cancelled=stream.finish not in ("stop", "length"))
            )
        task.add_done_callback(partial(self._ended, request.request, rank, stream))

    def holds_embedding(self, item: PromptMedia) -> bool:
        """See `Engine.holds_embedding`."""
        return self._embeddings is not None and self._embeddings.holds(item)

    async def put_embedding(self, item: PromptMedia, image: EncodedImage) -> None:
        """See `Engine.put_embedding`."""
        if self._embeddings is None:
            self._reject("image_embeddings")
        await self._embeddings.put(item, image)

    def _prompt(self, request: GenerateRequest, tokens: list[int]) -> dict[str, Any]:
        """A prompt as vLLM takes it. Raises `RequestRejected`."""
        if self._speech is not None:
            return speech_prompt(tokens, request, self._speech)
        fields = self._embeddings.fields_of(request.media) if self._embeddings is not None else None
        prompt = media_prompt(tokens, request.media, self._media, fields)
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        return prompt

    def _params(self, request: GenerateRequest, transfer: Transfer | None, rank: int) -> Any:
        """VLLM's SamplingParams. Raises `RequestRejected` and `Unusable`."""
        try:
            return self._made_params(request, transfer, rank)
        except Unusable:
            raise
        except Exception as error:
            rejection = rejection_of(error)
            raise rejection if rejection is not None else error from error

    def _made_params(self, request: GenerateRequest, transfer: Transfer | None, rank: int) -> Any:
        cold = self._ranks[rank].translator.cold
        if self._handoffs is not None and request.leg == "prefill":
            prompt_logprobs = request.sampling.prompt_logprobs
            return sampling.prefill(dict(handoff.PREFILL), prompt_logprobs=prompt_logprobs, report_hits=cold)
        fetch = None
        if self._handoffs is not None and request.leg == "decode" and transfer is not None:
            fetch = self._handoffs.fetch(unseal(transfer.params, request))
        return sampling.answer(request.sampling, fetch=fetch, report_hits=cold)

    def _ended(self, request: str, rank: int, stream: AnswerStream, task: asyncio.Task[None]) -> None:
        """Emit exactly one final step, whatever happened, also before the task's first step."""
        self._tasks.pop(request, None)
        self._ranks[rank].running.discard(request)
        if not stream.ended:
            stream.send(
                Step((), "abort")
                if task.cancelled()
                else Step((), "error", detail="vLLM ended the request without a finish reason")
            )

    async def _generate(
        self,
        request: GenerateRequest,
        prompt: dict[str, Any],
        params: Any,
        lora: Any,
        rank: int,
        stream: AnswerStream,
    ) -> None:
        tokens = prompt.get("prompt_token_ids", ())
        reported_cached = scored = False
        scores: tuple[TokenLogprob | None, ...] = ()
        try:
            async for output in self._engine.generate(
                prompt,
                params,
                request.request,
                lora_request=lora,
                trace_headers=self._trace_headers(request),
                # Other scheduling policies reject priorities.
                priority=request.priority if "priority" in self.capabilities else 0,
                data_parallel_rank=rank if self.ranks > 1 else None,
            ):
                answer = output.outputs[0]
                cached = -1
                if not reported_cached and output.num_cached_tokens is not None:
                    reported_cached, cached = True, output.num_cached_tokens
                finish = FINISHES.get(answer.finish_reason, "error") if output.finished else ""
                detail = f"vLLM: {answer.finish_reason}" if finish == "error" else ""
                if finish == "error" and request.sampling.guide is not None and request.leg != "decode":
                    # Its only other causes are a failed transfer and a dying engine, which raises.
                    finish, detail = (
                        "rejected",
                        "what the answer must conform to cannot be compiled or followed",
                    )
                logprobs = sampling.logprobs(answer, request.sampling.logprobs or 0)
                pinned = None
                if stream.is_prefill and self._handoffs is not None and finish in ("stop", "length"):
                    pinned = self._handoffs.pinned(output.kv_transfer_params)
                    pinned = pinned and pinned._replace(params=seal(pinned.params, request))
                if not scored:
                    scores = sampling.prompt_logprobs(
                        tokens, output.prompt_logprobs, request.sampling.prompt_logprobs
                    )
                    scored = bool(scores)
                tokens_now = tuple(answer.token_ids)
                stream.send(Step(tokens_now, finish, cached, logprobs, detail, pinned, "", scores))
                scores = ()
        except Exception as error:  # the boundary to vLLM: any exception ends this request
            rejection = rejection_of(error)
            if rejection is not None:
                _log.info("request_rejected", attempt=request.request, param=rejection.param)
                stream.send(Step((), "rejected", detail=str(rejection), param=rejection.param))
                return
            _log.error("generate_failed", attempt=request.request, failure=failure_place(error))
            _log.debug("generate_failure", attempt=request.request, exc_info=True)
            if self._engine is not None and self._engine.errored:
                stream.send(Step((), "died", detail=death_of(self._engine, self._failure_file)))
            else:
                stream.send(Step((), "error", detail=f"{type(error).__name__}; see the worker's log"))

    async def stop(self) -> None:
        """See `Engine.stop`."""
        await self._cancel_requests()
        for rank in self._ranks:
            rank.socket.close()
        if self._engine is not None:
            engine, self._engine = self._engine, None
            shut_down(engine)
        if self._embeddings is not None:
            self._embeddings.store.close()
        if self._folder is not None:
            process.give_up(self._folder)


def _logprobs_max(configured: int) -> int:
    """Maximum alternatives per token that a request may have; vLLM's -1 is no bound."""
    return LOGPROBS_MAX if configured < 0 else min(configured, LOGPROBS_MAX)
