"""A double of TensorRT-LLM: its API as recorded, our simulated scheduler behind it, and its faults on demand."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import count
from types import ModuleType
from typing import Any
from zlib import crc32

from headwater.engines.engine import LoraAdapter, RequestRejected, Step, Transfer
from headwater.engines.sim import StepTime
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.engines.sim.handoff import SimFabric, SimHandoff
from headwater.engines.tensorrt_llm import config
from headwater.schemas import hashing
from headwater.schemas.clock import Clock, SystemClock
from headwater.schemas.inference import GenerateRequest, Leg, Sampling
from tests.support.tensorrt_llm import images, signatures
from tests.support.tensorrt_llm.events import EventBuffer
from tests.support.tensorrt_llm.faults import Faults
from tests.support.tensorrt_llm.metrics import MetricsCollector
from tests.support.tensorrt_llm.outputs import Logprob, Output
from tests.support.tensorrt_llm.tensors import Tensor, logits_of, picked

VERSION = "1.2.1"
GENERATES = signatures.signature_of(config.GENERATE_ASYNC, first="inputs")

_numbers = count(1)


class World:
    """What the instances of one test share: memory, meeting points of legs, the clock."""

    def __init__(self, clock: Clock | None = None, step_time: StepTime | None = None, **sim: Any) -> None:
        self.clock = clock or SystemClock()
        self.fabric = SimFabric()
        self.meetings: dict[int, asyncio.Future[Transfer]] = {}
        self.faults = Faults()
        self.step_time = step_time or StepTime()
        self.sim = {"total_blocks": 4_096, "script": tuple(range(300, 400)), **sim}
        self.input_processor: Any = None
        """Of a model that takes images: see `images`."""
        self.arguments: list[dict[str, Any]] = []

    def meeting(self, number: int) -> "asyncio.Future[Transfer]":
        """Where the two legs of a request meet."""
        return self.meetings.setdefault(number, asyncio.get_running_loop().create_future())


class Result:
    """`RequestOutput`: iterated over once per step, each time the same object."""

    def __init__(
        self, llm: "LLM", rank: int, request: GenerateRequest, streaming: bool, kind: str, top: int | None
    ) -> None:
        self.outputs = [Output()]
        self.finished = False
        self.cached_tokens = 0
        self.context_logits: Tensor | None = None
        self.metrics_dict: dict[str, Any] | None = None
        self._llm = llm
        self._engine = llm.engines[rank]
        self.request = request
        self._streaming = streaming
        self._kind = kind
        self._top = top
        self.params: Any = None
        self._steps: asyncio.Queue[Step] = asyncio.Queue()

    def take(self, step: Step) -> None:
        """A step of the simulated engine."""
        self._steps.put_nowait(step)

    def __aiter__(self) -> "Result":
        return self

    async def __anext__(self) -> "Result":
        if self.finished:
            raise StopAsyncIteration
        while True:
            if self._llm.world.faults.iteration is not None:
                raise self._llm.world.faults.iteration
            step = await self._steps.get()
            self._apply(step)
            if self.finished or (self._streaming and step.tokens):
                return self

    async def aresult(self) -> "Result":
        """Wait for the end."""
        async for _ in self:
            pass
        return self

    def abort(self) -> None:
        """Cancel it."""
        self._llm.world.faults.aborts.append((self._kind, bool(self.outputs[0].token_ids)))
        self._llm.cancel(self)
        self._engine.abort(self.request.request)

    def _apply(self, step: Step) -> None:
        output = self.outputs[0]
        tokens = tuple(picked(token, self.params, self.request, output.token_ids) for token in step.tokens)
        step = step._replace(tokens=tokens)
        output.token_ids += step.tokens
        if self.params.return_context_logits and self.context_logits is None:
            # Only of what was computed.
            self.context_logits = logits_of(self.request)[max(step.cached_tokens, 0) :]
        if self._top is not None:
            output.logprobs += [
                {token: Logprob(-0.1)} | {1_000 + n: Logprob(-1.0 - n) for n in range(max(self._top - 1, 0))}
                for token in step.tokens
            ]
        if step.cached_tokens >= 0:
            self.cached_tokens = step.cached_tokens
        if step.pinned is not None and self._kind == "context_only":
            output.disaggregated_params = self._llm.disaggregated(self, step)
        if step.finish:
            self.finished = True
            output.finish_reason = {"abort": "cancelled", "error": "timeout"}.get(step.finish, step.finish)
            self.metrics_dict = {"finished_reason": output.finish_reason}
            self._llm.left(self)


class LLM:
    """`tensorrt_llm.LLM`, as far as it is recorded."""

    world: World

    def __init__(self, **given: Any) -> None:
        signatures.check_arguments(config.LLM_ARGUMENTS, given, "LLM")
        for name, known in config.NESTED_ARGUMENTS.items():
            signatures.check_arguments(known, given.get(name) or {}, name)
        world, self.args = self.world, given
        world.arguments.append(given)
        cache = given["kv_cache_config"]
        self._size = int(cache["tokens_per_block"])
        self._slots = int(given.get("max_batch_size") or 2048)
        transceiver = given.get("cache_transceiver_config") or {}
        self._buffer = int(transceiver.get("max_tokens_in_buffer") or 0)
        settings = SimSettings(
            block_size=self._size,
            context_length=int(given.get("max_seq_len") or 8_192),
            step_time=world.step_time,
            eos_token_id=2,
            sequences_max=self._slots,
            **world.sim,
        )
        ranks = int(given.get("tensor_parallel_size") or 1) if given.get("enable_attention_dp") else 1
        self._name = f"llm{next(_numbers)}"
        self.engines = [
            SimEngine(
                settings,
                world.clock,
                SimHandoff(f"{self._name}-{number}", world.clock, world.fabric, "opaque"),
            )
            for number in range(ranks)
        ]
        buffer = int(cache.get("event_buffer_max_size") or 0)
        self._events = [
            EventBuffer(number, self._size, buffer, attention_dp=ranks > 1) for number in range(ranks)
        ]
        self.input_processor = world.input_processor
        self._active: set[Result] = set()
        self._readers: list[asyncio.Task[None]] = []
        self._decoding: list[asyncio.Task[None]] = []
        self._requests = 0
        self.disaggregated_params = {"ctx_info_endpoint": f"tcp://{self._name}"}

    def _start(self) -> None:
        if not self._readers:
            for engine, events in zip(self.engines, self._events):
                self._readers.append(asyncio.ensure_future(events.follow(engine)))
                self._readers.append(asyncio.ensure_future(engine.start()))  # type: ignore[arg-type]

    def generate_async(self, *positional: Any, **named: Any) -> Result:
        """Submit one prompt."""
        given = GENERATES.bind(*positional, **named).arguments
        params, disagg = given["sampling_params"], given.get("disaggregated_params")
        if params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        self._start()
        self._requests += 1
        kind = disagg.request_type if disagg is not None else "context_and_generation"
        legs: dict[str, Leg] = {"context_only": "prefill", "generation_only": "decode"}
        scheduling = given.get("scheduling_params")
        # Relaxed, it may run on any rank.
        strict = scheduling if scheduling is not None and not scheduling.attention_dp_relax else None
        rank = (strict.attention_dp_rank or 0) if strict is not None else 0
        lora = given.get("lora_request")
        prompt, media = images.expanded(given["inputs"], self.input_processor)
        tokens = hashing.pack_tokens(prompt)
        sampling = Sampling(
            params.max_tokens,
            temperature=params.temperature or 0.0,
            seed=self._seed(params, prompt),
            min_tokens=params.min_tokens or 0,
            ignore_eos=bool(params.ignore_eos),
            stop_token_ids=tuple(params.stop_token_ids or ()),
        )
        request = GenerateRequest(
            f"{self._name}-{self._requests}",
            "",
            0,
            tokens,
            sampling,
            lora_name=lora.lora_name if lora is not None else "",
            cache_salt=given.get("cache_salt") or "",
            leg=legs.get(kind, ""),
            media=media,
        )
        if lora is not None:
            self.engines[rank]._loras[lora.lora_name] = LoraAdapter(lora.lora_name, lora.lora_path, 1)
        result = Result(self, rank, request, bool(given.get("streaming")), kind, params.logprobs)
        result.params = params
        result.disagg = disagg  # type: ignore[attr-defined]
        self._active.add(result)
        events = self._events[rank]
        events.know(request)
        if len(self._active) > self._slots:
            # 18742: it admits more than it has slots for, and none of them ever moves.
            return result
        if kind == "generation_only":
            if self.world.faults.kv_never_arrives or (self._buffer and len(prompt) > self._buffer):
                return result
            self._decoding.append(asyncio.ensure_future(self._decode(result, rank, disagg)))
        else:
            self._submit(result, rank, None)
            if (
                disagg is not None
                and disagg.schedule_style == signatures.DisaggScheduleStyle.GENERATION_FIRST
            ):
                self.world.meeting(disagg.disagg_request_id)
        return result

    def _seed(self, params: Any, prompt: list[int]) -> int | None:
        """Where in its text the answer begins: after the prompt's last token, if that is a part of it."""
        script = self.world.sim["script"]
        if prompt and prompt[-1] in script:
            return int(script.index(prompt[-1])) + 1
        return (
            params.seed
            if params.seed is not None or params.temperature
            else crc32(hashing.pack_tokens(prompt))
        )

    def _submit(self, result: Result, rank: int, transfer: Transfer | None) -> None:
        events = self._events[rank]

        def emit(step: Step) -> None:
            events.generated(result.request, step)
            result.take(step)
            if step.pinned is not None and result.disagg is not None:  # type: ignore[attr-defined]
                meeting = self.world.meeting(result.disagg.disagg_request_id)  # type: ignore[attr-defined]
                if not meeting.done():
                    meeting.set_result(Transfer(step.pinned.params, step.pinned.first_tokens))

        try:
            self.engines[rank].submit(result.request, emit, transfer)
        except RequestRejected as error:
            self._active.discard(result)
            raise ValueError(str(error)) from error

    async def _decode(self, result: Result, rank: int, disagg: Any) -> None:
        if disagg.opaque_state is not None:
            transfer = Transfer(disagg.opaque_state, tuple(disagg.first_gen_tokens or ()))
        else:
            transfer = await self.world.meeting(disagg.disagg_request_id)
        if not result.finished:
            self._submit(result, rank, transfer)

    def disaggregated(self, result: Result, step: Step) -> Any:
        """What a finished prefill returns."""
        assert step.pinned is not None
        return signatures.DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=list(step.pinned.first_tokens),
            ctx_request_id=result.disagg.disagg_request_id,  # type: ignore[attr-defined]
            disagg_request_id=result.disagg.disagg_request_id,  # type: ignore[attr-defined]
            opaque_state=step.pinned.params,
        )

    def cancel(self, result: Result) -> None:
        """A request that the scheduler does not have ends at once."""
        if result.request.request not in [name for engine in self.engines for name in engine._by_id]:
            result.take(Step((), "abort"))

    def left(self, result: Result) -> None:
        """A request has ended."""
        self._active.discard(result)

    async def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """Events since the last call; nothing before the first request."""
        faults = self.world.faults
        for events in self._events:
            for event in events.take():
                if faults.loses_events:
                    faults.loses_events -= 1
                    continue
                yield event
        raise TimeoutError

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """One iteration's statistics per rank."""
        if self.world.faults.stats is not None:
            raise self.world.faults.stats
        for number, engine in enumerate(self.engines):
            load = engine.load()
            used = load.total_blocks if self.world.faults.leaks else load.used_blocks if load.running else 0
            if self._requests:
                yield {
                    "attentionDpRank": number,
                    "numActiveRequests": load.running,
                    "numQueuedRequests": load.waiting,
                    "kvCacheStats": {"usedNumBlocks": used, "maxNumBlocks": load.total_blocks},
                }

    def _collective_rpc(self, method: str, arguments: tuple[Any, ...]) -> None:
        for engine, events in zip(self.engines, self._events):
            if method == "sleep":
                engine._cache.clear()
                engine._cache.take_events()
                events.forget()

    def _check_health(self) -> bool:
        while self.world.faults.hangs_health.is_set():
            threading.Event().wait(0.01)
        return not self.world.faults.dead

    @property
    def _executor(self) -> Any:
        class Executor:
            _fatal_error = self.world.faults.dead or None

        return Executor()

    def shutdown(self) -> None:
        """End it. Called from another thread."""
        while self.world.faults.hangs_shutdown:
            threading.Event().wait(0.01)
        for task in (*self._readers, *self._decoding):
            task.get_loop().call_soon_threadsafe(task.cancel)
        for engine in self.engines:
            if engine._loop is not None:
                engine._loop.get_loop().call_soon_threadsafe(engine._loop.cancel)


LLM.__init__.__signature__ = signatures.signature_of(sorted(config.LLM_ARGUMENTS))  # type: ignore[attr-defined]
LLM.generate_async.__signature__ = signatures.signature_of(  # type: ignore[attr-defined]
    config.GENERATE_ASYNC
)


def modules_of(world: World) -> dict[str, ModuleType]:
    """The package's modules, and as much of torch as the adapter uses."""
    names = (
        "tensorrt_llm",
        "tensorrt_llm.sampling_params",
        "tensorrt_llm.disaggregated_params",
        "tensorrt_llm.scheduling_params",
        "tensorrt_llm.executor",
        "tensorrt_llm.executor.request",
        "tensorrt_llm.metrics",
        "torch",
    )
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    top = modules["tensorrt_llm"]
    top.LLM = type("LLM", (LLM,), {"world": world})
    top.SamplingParams = signatures.SamplingParams
    top.__version__ = VERSION
    modules["tensorrt_llm.sampling_params"].GuidedDecodingParams = signatures.GuidedDecodingParams
    disagg = modules["tensorrt_llm.disaggregated_params"]
    disagg.DisaggregatedParams = signatures.DisaggregatedParams
    disagg.DisaggScheduleStyle = signatures.DisaggScheduleStyle
    modules["tensorrt_llm.scheduling_params"].SchedulingParams = signatures.SchedulingParams
    modules["tensorrt_llm.executor.request"].LoRARequest = signatures.LoRARequest
    modules["tensorrt_llm.metrics"].MetricsCollector = MetricsCollector
    modules["torch"].from_numpy = lambda array: array
    return modules


@contextmanager
def installed(world: World) -> Iterator[World]:
    """The double in the place of the package."""
    modules = modules_of(world)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield world
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
