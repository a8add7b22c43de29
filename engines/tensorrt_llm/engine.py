"""TensorRT-LLM's `LLM` with the PyTorch backend as an `Engine`: tokens in, tokens out."""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Mapping
from functools import partial
from hashlib import sha256
from typing import Any, Final

import structlog
from tokenizers import Tokenizer

from headwater.engines.engine import (
    Emit,
    EngineDied,
    EngineError,
    EngineInfo,
    EngineLoad,
    KvEvent,
    RequestRejected,
    Step,
    Transfer,
    Unusable,
    UsedHandoffs,
    check_length,
    check_loaded,
    check_processors,
    start_failure,
)
from headwater.engines.process import interruptible
from headwater.engines.tensorrt_llm import config, operations, polling
from headwater.engines.tensorrt_llm.config import (
    TRANSFER_TIMEOUT_MS,
    TensorRtSettings,
    accepted,
    arguments,
    attention_ranks,
    takes,
)
from headwater.engines.tensorrt_llm.operations import Leg, TensorRtControl
from headwater.engines.tensorrt_llm.polling import LibraryMetrics, RankState, Watchdog, load_library
from headwater.engines.tensorrt_llm.sampling import TensorRtImages, image_handling, sampling_params
from headwater.schemas import hashing
from headwater.schemas.clock import Clock
from headwater.schemas.events import BlocksStored
from headwater.schemas.inference import GenerateRequest, Sampling
from headwater.schemas.tables import Capability, MediaSupport


def capabilities(
    settings: TensorRtSettings, arguments: Mapping[str, Any], llm: Any, *, images: bool = False
) -> frozenset[Capability]:
    """Return the capabilities, from the settings, the arguments and the signatures of the `LLM` made with them. `images`: the model takes some."""
    cache = arguments["kv_cache_config"]
    has_events = bool(cache.get("enable_block_reuse")) and int(cache.get("event_buffer_max_size") or 0) > 0
    has_salt = takes(llm.generate_async, "cache_salt")
    offered: dict[Capability, bool] = {
        "generate": True,
        "logprobs": True,
        "images": images,
        "seed": True,
        "kv_events": has_events,
        "kv_dump": has_events,
        "cache_salt": has_salt,
        "priority": takes(llm.generate_async, "priority"),
        "guide": bool(arguments.get("guided_decoding_backend")),
        "processors": bool(settings.options.logits_processors),
        "lora": bool(arguments.get("enable_lora") and arguments.get("lora_config")),
        "handoff": bool((arguments.get("cache_transceiver_config") or {}).get("backend")),
        "sleep": hasattr(llm, "_collective_rpc"),
        "logit_bias": settings.files.vocabulary > 0,
        "allowed_tokens": settings.files.vocabulary > 0,
        # A logits processor, which an engine that reports KV events does not survive: see `checks`.
        "bad_words": bool(settings.files.tokenizer) and not has_events,
        # Tokens that are taken from the cache have no logits: such a request gets a salt of its own.
        "prompt_logprobs": has_salt or not cache.get("enable_block_reuse"),
    }
    return frozenset(name for name, is_there in offered.items() if is_there)


FIRST_ANSWER_S_MAX: Final = 600.0
STOP_S_MAX: Final = 30.0
LEAK_SHARE: Final = 0.95
LEAK_MARGIN_S: Final = 30.0
"""Blocks in use without a request, for this long after every transfer must have ended, are lost (TensorRT-LLM 12313)."""

_log = structlog.get_logger("headwater.tensorrt_llm")


class TensorRtEngine(TensorRtControl):
    """See `headwater.engines.engine.Engine` and, for attention data parallelism, `headwater.engines.ranked`."""

    def __init__(self, settings: TensorRtSettings, clock: Clock, *, gpus: int = 0) -> None:
        super().__init__()
        self._settings = settings
        self._clock = clock
        self._arguments = arguments(settings)
        config.check(settings, self._arguments, gpus=gpus)
        self.ranks = attention_ranks(self._arguments)
        self.choreography = operations.CHOREOGRAPHIES[settings.options.handoff]
        transceiver = self._arguments.get("cache_transceiver_config") or {}
        self._transfer_s = int(transceiver.get("kv_transfer_timeout_ms") or TRANSFER_TIMEOUT_MS) / 1000
        self._legs: dict[str, Leg] = {}
        self._used_handoffs = UsedHandoffs()
        self._tasks: list[asyncio.Task[None]] = []
        self._watchdog: Watchdog | None = None
        self._failure = ""
        self._tokenizer: Tokenizer | None = None
        self._full_since_s: float | None = None
        self._images: TensorRtImages | None = None
        self._traces = False

    async def start(self) -> EngineInfo:
        """See `Engine.start`. Loads for seconds to minutes on this thread, on which nothing else runs yet."""
        with interruptible():
            api = self._api = load_library()
            try:
                self._llm = api.LLM(**accepted(api.LLM.__init__, self._arguments))
            except Exception as error:  # whatever TensorRT-LLM raises while it starts, it did not start
                raise start_failure(
                    f"TensorRT-LLM cannot start with {self._settings.worker.model}", error
                ) from error
        engine_arguments = self._arguments
        # How the legs of a request with images are joined depends on the model: only whole requests may have some.
        own = self._settings.worker
        self._images = image_handling(self._llm, own.model) if own.role == "both" else None
        self.capabilities = capabilities(
            self._settings, engine_arguments, self._llm, images=self._images is not None
        )
        self._traces = bool(engine_arguments.get("otlp_traces_endpoint")) and takes(
            self._llm.generate_async, "trace_headers"
        )
        self._metrics = LibraryMetrics(self._settings.files.name)
        if "bad_words" in self.capabilities:
            self._tokenizer = Tokenizer.from_buffer(self._settings.files.tokenizer)
        slots = int(engine_arguments.get("max_batch_size") or 2048)
        size = int(engine_arguments["kv_cache_config"]["tokens_per_block"])
        self._ranks = [RankState(number, size, slots, self._images) for number in range(self.ranks)]
        self._watchdog = Watchdog(self._llm, self._clock)
        self._watchdog.start()
        await self._first_answer()
        self._tasks += [
            asyncio.create_task(self._poll(*poll), name=f"TensorRT-LLM {poll[0]}") for poll in self._polls()
        ]
        lora = engine_arguments.get("lora_config") or {}
        self._info = EngineInfo(
            self._settings.files.name,
            size,
            self._ranks[0].total_blocks,
            slots,
            int(engine_arguments.get("max_seq_len") or self._settings.files.context_length),
            version=str(api.version),
            pairs_with=f"tensorrt_llm/{api.version}/{self._settings.files.name}/{engine_arguments.get('dtype') or 'auto'}"
            if "handoff" in self.capabilities
            else "",
            lora_slots=int(lora.get("max_loras") or 0),
            lora_rank_max=int(lora.get("max_lora_rank") or 0),
            processors=tuple(self._settings.options.logits_processors)
            if "processors" in self.capabilities
            else (),
            vocabulary=self._settings.files.vocabulary,
            media=MediaSupport(self._images.support if self._images is not None else None),
        )
        return self._info

    async def _first_answer(self) -> None:
        """One token: before the first request there are neither statistics nor events."""
        params = sampling_params(self._api, Sampling(1, temperature=0.0, ignore_eos=True), self._settings)
        async with asyncio.timeout(FIRST_ANSWER_S_MAX):
            await self._llm.generate_async([1], sampling_params=params).aresult()
            while not self._ranks[0].total_blocks:
                await polling.poll_once(self._stats, self._take_stats)
                await self._clock.sleep(polling.STATS_PAUSE_S[0])
        for rank in self._ranks:
            rank.total_blocks = rank.total_blocks or self._ranks[0].total_blocks

    def _stats(self) -> AsyncIterator[dict[str, Any]]:
        stats: AsyncIterator[dict[str, Any]] = self._llm.get_stats_async(timeout=polling.STATS_TIMEOUT_S)
        return stats

    def _events(self) -> AsyncIterator[dict[str, Any]]:
        events: AsyncIterator[dict[str, Any]] = self._llm.get_kv_cache_events_async(
            timeout=polling.EVENTS_TIMEOUT_S
        )
        return events

    def _take_stats(self, stats: dict[str, Any]) -> None:
        self._ranks[self._rank_of(stats, "attentionDpRank")].take_stats(stats)
        self._metrics.take_iteration(stats)

    def _take_event(self, event: dict[str, Any]) -> None:
        self._ranks[self._rank_of(event, "attention_dp_rank")].take_event(event)

    def _rank_of(self, item: dict[str, Any], key: str) -> int:
        number = int(item.get(key) or 0)
        return number if number < len(self._ranks) else 0

    def _polls(self) -> list[tuple[str, polling.Fetch, polling.Take, tuple[float, float]]]:
        polls: list[tuple[str, polling.Fetch, polling.Take, tuple[float, float]]] = [
            ("statistics", self._stats, self._take_stats, polling.STATS_PAUSE_S)
        ]
        if "kv_events" in self.capabilities:
            polls.append(("KV events", self._events, self._take_event, polling.EVENTS_PAUSE_S))
        return polls

    async def _poll(
        self, source_name: str, fetch: polling.Fetch, take: polling.Take, pause_s: tuple[float, float]
    ) -> None:
        try:
            await polling.poll(fetch, take, pause_s, self._clock)
        except Exception as error:
            self._fail(f"its {source_name} cannot be read: {type(error).__name__}: {error}")

    def submit(
        self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None, *, rank: int = 0
    ) -> None:
        """See `Engine.submit` and `RankedEngine.submit`."""
        if self._failure:
            raise EngineDied(self._failure)
        self._check_supported(request)
        check_loaded(request.lora_name, self._loras)
        tokens: list[int] = hashing.unpack_tokens(request.tokens).tolist()
        self._check_length(len(tokens), request.sampling.max_tokens)
        check_processors(request.sampling.processors, self._settings.options.logits_processors)
        params = sampling_params(
            self._api,
            request.sampling,
            self._settings,
            prompt=len(tokens),
            prefill=request.leg == "prefill",
            tokenizer=self._tokenizer,
        )
        inputs = tokens if self._images is None else self._images.inputs(tokens, request.media)
        leg = Leg(request, emit, rank, transfer if request.leg == "decode" else None)
        self._legs[request.request] = leg
        leg.task = asyncio.get_running_loop().create_task(self._serve(leg, inputs, params))
        leg.task.add_done_callback(partial(self._remove, leg))

    def _check_length(self, prompt: int, answer: int) -> None:
        check_length(prompt, answer, self._info.context_length)
        limit = int(self._arguments.get("max_num_tokens") or 8192)
        if prompt > limit and not self._arguments.get("enable_chunked_prefill"):
            raise RequestRejected(
                f"{prompt} prompt tokens exceed max_num_tokens ({limit}) of this worker, which computes prompts in one piece"
            )

    def _remove(self, leg: Leg, task: "asyncio.Task[None]") -> None:
        self._legs.pop(leg.request.request, None)
        leg.send(Step((), "abort"))

    async def _serve(self, leg: Leg, inputs: Any, params: Any) -> None:
        rank = self._ranks[leg.rank]
        await self._open.wait()
        # TensorRT-LLM admits more requests than it has slots for sequences, and hangs (18742, 18983): the rest waits here.
        async with rank.slots:
            if leg.ended:
                return
            try:
                leg.handle = self._begin(leg, inputs, params)
            except (ValueError, TypeError, NotImplementedError) as error:
                leg.send(Step((), "rejected", detail=str(error)))
                return
            except Unusable as error:
                leg.send(Step((), "error", detail=f"the hand-off is invalid: {error}"))
                return
            try:
                await self._follow(leg)
            except Exception as error:
                # An error before the submission is the request's; one after it is the engine's.
                self._fail(f"{type(error).__name__}: {error}")

    def _begin(self, leg: Leg, inputs: Any, params: Any) -> Any:
        request, api = leg.request, self._api
        request_arguments: dict[str, Any] = {
            "sampling_params": params,
            "streaming": request.leg != "prefill",
            "lora_request": self._loras.get(request.lora_name),
            "disaggregated_params": self._disaggregated(leg),
        }
        if self._traces:
            request_arguments["trace_headers"] = self._settings.worker.traces.headers(
                request.request, request.trace
            )
        if self.ranks > 1:
            request_arguments["scheduling_params"] = api.SchedulingParams(
                attention_dp_rank=leg.rank, attention_dp_relax=False
            )
        if leg.scores_prompt:
            request_arguments["cache_salt"] = (
                secrets.token_hex(16) if "cache_salt" in self.capabilities else None
            )
        elif request.cache_salt:
            request_arguments["cache_salt"] = request.cache_salt
        if "priority" in self.capabilities:
            # A canary, which no edge sent, passes all others: it measures the engine, not the queue.
            request_arguments["priority"] = 1.0 if not request.edge else _priority(request.priority)
        return self._llm.generate_async(
            inputs, **{name: argument for name, argument in request_arguments.items() if argument is not None}
        )

    def _disaggregated(self, leg: Leg) -> Any:
        """Return how this leg takes part in a hand-off, None if it does not. Raises `Unusable`."""
        request, mode = leg.request, self._settings.options.handoff
        if request.leg == "prefill":
            number = operations.new_request_id()
            prefill_params = operations.for_prefill(self._api, mode, number)
            if mode == "generation-first":
                endpoint = (getattr(self._llm, "disaggregated_params", None) or {}).get("ctx_info_endpoint")
                params = operations.pack_meeting(request, number, endpoint, leg.rank)
                leg.pin(params, self._transfer_s)
            return prefill_params
        if leg.transfer is None:
            return None
        params_of = operations.unpack(request, leg.transfer)
        self._used_handoffs.use(sha256(leg.transfer.params).digest())
        return operations.for_decode(self._api, mode, params_of)

    async def _follow(self, leg: Leg) -> None:
        """Emit the outputs of a request until it ends; also of an aborted one, so that its slot is not given away."""
        results = leg.handle.__aiter__()
        while True:
            waiting = asyncio.ensure_future(results.__anext__())
            if leg.transfer is not None and not leg.sent and not leg.ended:
                await self._await_kv(leg, waiting)
            try:
                result = await waiting
            except StopAsyncIteration:
                leg.send(Step((), "error", detail="TensorRT-LLM ended the request without a reason"))
                return
            try:
                await leg.score_prompt(result)
            except EngineError as error:
                leg.fail(str(error))
            leg.take(result, self._transfer_s, as_opaque=self._settings.options.handoff == "opaque")
            if leg.done:
                self._metrics.take_result(result)
                return

    async def _await_kv(self, leg: Leg, waiting: "asyncio.Future[Any]") -> None:
        """Wait for the first token of a decode leg, until its KV must have come (12542: blocks evicted before the send).

        Later the request ends with an error, and its edge tries elsewhere; its slot stays taken until TensorRT-LLM
        answers, as aborting it before its KV has come would leave the transfer half done.
        """
        limit = asyncio.ensure_future(self._clock.sleep(self._transfer_s))
        await asyncio.wait({waiting, limit}, return_when=asyncio.FIRST_COMPLETED)
        limit.cancel()
        if not waiting.done():
            leg.late = True
            leg.send(Step((), "error", detail=f"its KV did not arrive within {self._transfer_s:g} s"))

    def abort(self, request: str) -> None:
        """See `Engine.abort`. The last step comes at once; a decode leg is aborted when its KV has come."""
        leg = self._legs.get(request)
        if leg is not None:
            asyncio.get_running_loop().call_soon(leg.abort)

    def kv_events(self, *, rank: int = 0) -> AsyncIterator[list[KvEvent]]:
        """See `Engine.kv_events`."""
        return self._ranks[rank].events()

    def held_blocks(self, *, rank: int = 0) -> list[BlocksStored]:
        """See `Engine.held_blocks`."""
        return self._ranks[rank].held()

    def load(self, *, rank: int = 0) -> EngineLoad:
        """See `Engine.load`."""
        state = self._ranks[rank]
        rank_legs = [leg for leg in self._legs.values() if leg.rank == rank]
        running = sum(leg.handle is not None for leg in rank_legs)
        used = max(
            state.used_blocks if running else 0, sum(leg.blocks(state.block_size) for leg in rank_legs)
        )
        return EngineLoad(
            running, len(rank_legs) - running, min(used, state.total_blocks), state.total_blocks
        )

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`. TensorRT-LLM has no call for it."""

    async def check(self) -> None:
        """See `Engine.check`. Besides its health: blocks that are lost, and decode legs whose KV never came."""
        if not self._failure and self._watchdog is not None:
            self._failure = self._watchdog.verdict or self._leak()
        if self._failure:
            self._fail(self._failure)
            raise EngineDied(self._failure)

    def _leak(self) -> str:
        late = sum(leg.late for leg in self._legs.values())
        if late and late == len(self._legs):
            return f"{late} decode legs wait for KV that never came, and nothing else runs"
        used, total = (
            sum(getattr(rank, name) for rank in self._ranks) for name in ("used_blocks", "total_blocks")
        )
        if self._legs or not total or used / total <= LEAK_SHARE:
            self._full_since_s = None
            return ""
        now = self._clock.monotonic_s()
        self._full_since_s = self._full_since_s if self._full_since_s is not None else now
        if now - self._full_since_s <= self._transfer_s + LEAK_MARGIN_S:
            return ""
        return f"{used} of {total} KV blocks are in use without any request: they are lost"

    async def stop(self) -> None:
        """See `Engine.stop`. A shutdown that hangs is left behind: it ends with this process."""
        for request in list(self._legs):
            self.abort(request)
        if self._watchdog is not None:
            self._watchdog.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        legs = [leg.task for leg in self._legs.values() if leg.task is not None]
        for task in legs:
            task.cancel()
        await asyncio.gather(*legs, return_exceptions=True)
        llm, self._llm = self._llm, None
        if llm is not None:
            ended = threading.Event()
            threading.Thread(target=_shut_down, args=(llm, ended), daemon=True).start()
            if not await asyncio.to_thread(ended.wait, STOP_S_MAX):
                _log.error("engine_stop_timed_out", after_s=STOP_S_MAX)

    def _fail(self, reason: str) -> None:
        """The engine has died: every request ends."""
        if not self._failure:
            _log.error("engine_died", engine=self.name, reason=reason)
        self._failure = self._failure or reason
        for leg in list(self._legs.values()):
            leg.send(Step((), "died", detail=self._failure))

    def _busy(self) -> int:
        return sum(leg.handle is not None or self._open.is_set() for leg in self._legs.values())


def _priority(priority: int) -> float:
    """Ours: lower is sooner, 0 is normal. TensorRT-LLM's: 0 to 1, higher is sooner, 0.5 is normal."""
    return min(max(0.5 - priority / 200, 0.0), 0.99)


def _shut_down(llm: Any, ended: threading.Event) -> None:
    try:
        llm.shutdown()
    except Exception as error:
        _log.warning("engine_shutdown_failed", reason=f"{type(error).__name__}: {error}")
    ended.set()
