"""The two-method class as an `Engine`: tasks, limits, aborts, control and failures around it.

An exception in the class's code is the engine's death: its traceback is logged, its requests end with an error, `check`
raises, and the worker ends with its epoch and is started again. `RequestRejected` concerns one request only.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog

from headwater.engines import registry
from headwater.engines.custom.api import (
    BLOCK_SIZE,
    EngineRequest,
    EngineSetup,
    Output,
    PoolingRequest,
    declared_capabilities,
)
from headwater.engines.engine import (
    AnswerStream,
    Emit,
    EmitFile,
    Engine,
    EngineBase,
    EngineDied,
    EngineError,
    EngineInfo,
    EngineLoad,
    EngineUnavailable,
    Finish,
    KvEvent,
    LoraAdapter,
    PauseMode,
    Pinned,
    RequestRejected,
    Step,
    Transfer,
    check_adapter,
    check_length,
    check_loaded,
    check_pooling,
    check_sleep,
    check_text_only,
)
from headwater.engines.kv_events import PendingKvEvents
from headwater.engines.launcher import EngineLauncher, WorkerSpec
from headwater.engines.model_files import ModelFiles
from headwater.engines.process import LoopWatch, folder_of
from headwater.schemas import hashing
from headwater.schemas.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.schemas.inference import EmbedRequest, GenerateRequest, ImageRequest, Sampling, VideoRequest

FORGOTTEN_MAX = 1024
"""Parents of blocks that are gone are removed once there are more of them than this and than the blocks held."""

Place = tuple[int, int]
"""Rank and tier."""


class HeldBlocks:
    """Copies of each block by place, and the parent of each."""

    def __init__(self) -> None:
        self._copies: dict[Place, Counter[int]] = defaultdict(Counter)
        self._parents: dict[int, int] = {}

    def __len__(self) -> int:
        """Copies of blocks on the fastest tier."""
        return sum(sum(copies.values()) for (_, tier), copies in self._copies.items() if tier == 0)

    def apply(self, event: KvEvent) -> None:
        """Fold one event."""
        if isinstance(event, BlocksStored):
            parent = event.parent
            for number in hashing.unpack_hashes(event.hashes).tolist():
                self._copies[event.rank, event.tier][number] += 1
                self._parents[number] = parent
                parent = number
        elif isinstance(event, BlocksRemoved):
            copies = self._copies[event.rank, event.tier]
            for number in hashing.unpack_hashes(event.hashes).tolist():
                copies[number] -= 1
                if copies[number] <= 0:
                    del copies[number]
        elif isinstance(event, BlocksCleared):
            for place in [place for place in self._copies if place[0] == event.rank]:
                del self._copies[place]
        if len(self._parents) > 2 * sum(map(len, self._copies.values())) + FORGOTTEN_MAX:
            held = {number for copies in self._copies.values() for number in copies}
            self._parents = {number: parent for number, parent in self._parents.items() if number in held}

    def stored(self) -> list[BlocksStored]:
        """All blocks, parents before children: one event per run."""
        return [
            _stored(self._parents[run[0]], run, place)
            for place, copies in self._copies.items()
            for run in self._runs(copies)
        ]

    def _runs(self, copies: Counter[int]) -> list[list[int]]:
        """Runs of blocks, each after those that it follows; a block with several copies is in as many runs."""
        runs: list[list[int]] = []
        listed: set[int] = set()
        for number in copies:
            chain: list[int] = []
            while number in copies and number not in listed:
                chain.append(number)
                listed.add(number)
                number = self._parents[number]
            if chain:
                runs.append(chain[::-1])
        return runs + [[number] for number, count in copies.items() for _ in range(count - 1)]


def _stored(parent: int, run: list[int], place: Place) -> BlocksStored:
    rank, tier = place
    return BlocksStored(parent, hashing.pack_hashes(np.array(run, np.uint64)), tier, rank)


# The engine around the class.


class AnswerCutter:
    """One answer. `eos` are the model's end tokens; `produced` counts the tokens so far."""

    def __init__(self, sampling: Sampling, eos: Collection[int]) -> None:
        self.produced = 0
        self._sampling = sampling
        self._stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._stops |= frozenset(eos)

    def take(self, output: Output) -> Step:
        """The step for what the engine yielded; the last one has a finish. Raises TypeError for another type."""
        step = output if isinstance(output, Step) else Step(_tokens(output))
        tokens, finish = self._cut(step.tokens)
        if len(tokens) < len(step.tokens):
            step = step._replace(tokens=tokens, logprobs=step.logprobs[: len(tokens)])
        self.produced += len(tokens)
        return step._replace(finish=finish or step.finish)

    def end(self) -> Step:
        """The step for the end of the generator: the model ended its answer."""
        return Step((), "stop")

    def _cut(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], Finish]:
        sampling = self._sampling
        for index, token in enumerate(tokens):
            count = self.produced + index + 1
            if token in self._stops and count >= sampling.min_tokens:
                return tuple(tokens[: index + 1]), "stop"
            if count >= sampling.max_tokens:
                return tuple(tokens[: index + 1]), "length"
        return tuple(tokens), ""


def _tokens(output: Any) -> tuple[int, ...]:
    if isinstance(output, int):
        return (output,)
    is_sequence = isinstance(output, Sequence) and not isinstance(output, str | bytes)
    if is_sequence and all(isinstance(token, int) for token in output):
        return tuple(output)
    raise TypeError(
        f"generate yielded {type(output).__name__}: yield a token id, a sequence of them, or a Step"
    )


STOP_S_MAX = 5.0
"""How long the class's code may take to end its requests once it is stopped."""

T = TypeVar("T")

_log = structlog.get_logger("headwater.custom")


class _Running(AnswerStream):
    """One request, as the class gets it."""

    def __init__(self, whole: GenerateRequest, request: EngineRequest, emit: Emit) -> None:
        super().__init__(whole, emit)
        self.request = request
        self.admitted = False
        self.started = False
        self.produced = 0
        self.task: asyncio.Task[None] | None = None


class CustomEngine(EngineBase):
    """An engine in one file as an `Engine`. `engine` is an instance of a class with the two methods."""

    def __init__(self, name: str, engine: Any, setup: EngineSetup) -> None:
        self.name = name
        self._engine = engine
        self._info = EngineInfo("", 1, 0, 1, 0)
        self._loras: set[str] = set()
        self._asleep = False
        self._open = asyncio.Event()
        """Are new requests started?"""
        self._open.set()
        self._going = asyncio.Event()
        """Do running requests continue?"""
        self._going.set()
        self._drained = asyncio.Event()
        """Set whenever a request has left."""
        self._paused = False
        self.capabilities = declared_capabilities(type(engine))
        self.choreography = getattr(engine, "choreography", "returned")
        self.aborts = getattr(engine, "aborts", "anytime")
        self._setup = setup
        self._requests: dict[str, _Running] = {}
        self._held = HeldBlocks()
        self._events = PendingKvEvents()
        self._reader: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(1)
        self._failure: BaseException | None = None
        self._started = False
        self._watch = LoopWatch(name, folder_of(type(engine)))

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        self._watch.start()
        info = await self._call(self._engine.start, self._setup)
        self._info = self._checked(info)
        self._started = True
        self._slots = asyncio.Semaphore(self._info.max_running)
        if "kv_events" in self.capabilities:
            self._reader = asyncio.create_task(self._read_events(), name=f"{self.name} KV events")
        return self._info

    def _checked(self, info: Any) -> EngineInfo:
        if not isinstance(info, EngineInfo):
            kind = type(info).__name__
            self._fail(TypeError(f"start returned {kind}: return an EngineInfo, such as setup.info()"))
            raise EngineDied(str(self._failure))
        engine_info: EngineInfo = info
        if "handoff" in self.capabilities and not engine_info.pairs_with:
            engine_info = engine_info._replace(pairs_with=f"{self.name}/{engine_info.model}")
        if "image_generation" in self.capabilities and engine_info.image_generation is None:
            self._fail(TypeError("start says nothing of its images: return setup.info(image_generation=...)"))
            raise EngineDied(str(self._failure))
        if "video_generation" in self.capabilities and engine_info.video_generation is None:
            self._fail(TypeError("start says nothing of its videos: return setup.info(video_generation=...)"))
            raise EngineDied(str(self._failure))
        if "embed" in self.capabilities and not engine_info.tasks:
            engine_info = engine_info._replace(tasks=("embed",))
        return engine_info

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`."""
        self._check_supported(request)
        check_loaded(request.lora_name, self._loras)
        if self._failure is not None:
            raise EngineDied(f"{self.name} has failed: {self._failure}")
        tokens: tuple[int, ...] = tuple(hashing.unpack_tokens(request.tokens).tolist())
        check_length(len(tokens), request.sampling.max_tokens, self._info.context_length)
        running = _Running(
            request,
            EngineRequest(
                request.request,
                tokens,
                request.sampling,
                request.lora_name,
                request.cache_salt,
                request.priority,
                request.leg,
                transfer if request.leg == "decode" else None,
            ),
            emit,
        )
        self._requests[request.request] = running
        running.task = asyncio.get_running_loop().create_task(self._serve(running))
        running.task.add_done_callback(partial(self._remove, running))

    def _remove(self, running: _Running, task: "asyncio.Task[None]") -> None:
        self._requests.pop(running.request.id, None)
        # A task that was cancelled before it began has emitted nothing.
        running.send(Step((), "abort"))
        self._drained.set()

    async def _serve(self, running: _Running) -> None:
        try:
            await self._open.wait()
            running.admitted = True
            async with self._slots:
                running.started = True
                if running.request.leg == "prefill":
                    await self._prefill(running)
                else:
                    await self._generate(running)
        except asyncio.CancelledError:
            running.send(Step((), "abort"))
        except RequestRejected as error:
            running.send(Step((), "rejected", detail=str(error), param=error.param))
        except EngineError as error:
            running.send(Step((), "error", detail=str(error)))
        except Exception as error:
            self._fail(error, culprit=running)

    async def _generate(self, running: _Running) -> None:
        cutter = AnswerCutter(running.request.sampling, self._setup.files.eos_token_ids)
        async with aclosing(self._engine.generate(running.request)) as outputs:
            async for output in outputs:
                await self._unsuspended()
                step = cutter.take(output)
                running.produced = cutter.produced
                running.send(step)
                if step.finish:
                    return
                # A generator that never waits would keep aborts and other requests out.
                await asyncio.sleep(0)
        running.send(cutter.end())

    async def _prefill(self, running: _Running) -> None:
        pinned = await self._engine.prefill(running.request)
        if not isinstance(pinned, Pinned | None):
            raise TypeError(f"prefill returned {type(pinned).__name__}: return a Pinned, or None")
        if running.ended and pinned is not None:
            await self._engine.release(running.request.id, pinned.params)
        running.send(Step((), "length", pinned=pinned))

    def abort(self, request: str) -> None:
        """See `Engine.abort`. The last step comes at once, however long the class takes to end."""
        running = self._requests.get(request)
        if running is not None and running.task is not None:
            asyncio.get_running_loop().call_soon(running.send, Step((), "abort"))
            running.task.cancel()

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`."""
        self._require("handoff")
        await self._call(self._engine.release, request, params)

    async def _read_events(self) -> None:
        try:
            async for events in self._engine.kv_events():
                for event in events:
                    self._held.apply(event)
                self._events.add(events)
        except Exception as error:
            self._fail(error)

    def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """See `Engine.kv_events`."""
        return self._events.batches()

    def held_blocks(self) -> list[BlocksStored]:
        """See `Engine.held_blocks`."""
        self._events.take()
        return self._held.stored()

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`."""
        if "clear_kv" in self.capabilities:
            await self._call(self._engine.clear_kv)

    def load(self) -> EngineLoad:
        """See `Engine.load`. Without a method of the class, blocks are estimated from lengths."""
        if callable(getattr(self._engine, "load", None)):
            try:
                load = self._engine.load()
            except Exception as error:
                self._fail(error)
            else:
                return EngineLoad(*load)
        size, total = self._info.block_size, self._info.total_blocks
        running = [active for active in self._requests.values() if active.started]
        used = sum(-(-(len(active.request.tokens) + active.produced) // size) for active in running)
        return EngineLoad(
            len(running), len(self._requests) - len(running), min(max(used, len(self._held)), total), total
        )

    async def check(self) -> None:
        """See `Engine.check`."""
        if self._failure is None and callable(getattr(self._engine, "check", None)):
            await self._call(self._engine.check)
        if self._failure is not None:
            raise EngineDied(
                f"{self.name} failed: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._watch.stop()
        self._abort_all()
        if self._reader is not None:
            self._reader.cancel()
        tasks = [running.task for running in self._requests.values() if running.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_S_MAX)
            if late:
                _log.warning("engine_stop_timed_out", engine=self.name, requests=len(late))
        if self._started and callable(getattr(self._engine, "stop", None)):
            self._started = False
            await self._engine.stop()

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`."""
        self._require("embed")
        check_text_only(request)
        check_loaded(request.lora_name, self._loras)
        prompts = tuple(tuple(hashing.unpack_tokens(packed).tolist()) for packed in request.prompts)
        check_pooling(self._info, request.task, tuple(map(len, prompts)))
        pooling = PoolingRequest(
            request.request, prompts, request.task, request.lora_name, request.dimensions
        )
        vectors = await self._call(self._engine.embed, pooling)
        return tuple(np.asarray(vector, "<f4").tobytes() for vector in vectors)

    async def generate_images(self, request: ImageRequest, emit: EmitFile) -> None:
        """See `Engine.generate_images`."""
        self._require("image_generation")
        await self._call(self._engine.generate_images, request, emit)

    async def generate_video(self, request: VideoRequest, emit: EmitFile) -> None:
        """See `Engine.generate_video`."""
        self._require("video_generation")
        await self._call(self._engine.generate_video, request, emit)

    async def load_lora(self, adapter: LoraAdapter) -> None:
        """See `Engine.load_lora`."""
        self._require("lora")
        if adapter.name in self._loras:
            return
        check_adapter(adapter, self._loras, self._info.lora_slots, self._info.lora_rank_max)
        await self._call(self._engine.load_lora, adapter)
        self._loras.add(adapter.name)

    async def unload_lora(self, name: str) -> None:
        """See `Engine.unload_lora`."""
        self._require("lora")
        if name in self._loras:
            self._loras.remove(name)
            await self._call(self._engine.unload_lora, name)

    async def sleep(self, level: int) -> None:
        """See `Engine.sleep`."""
        self._require("sleep")
        check_sleep(level, asleep=self._asleep, busy=self._busy())
        self._asleep = True
        self._hold()
        await self._call(self._engine.sleep, level)

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._require("sleep")
        await self._call(self._engine.wake)
        self._asleep = False
        self._hold()

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`. The class's `pause` is called once no request runs, or all are suspended."""
        self._require("pause")
        self._paused = True
        self._hold()
        if mode == "abort":
            self._abort_all()
        elif mode == "keep":
            self._going.clear()
        while mode != "keep" and self._busy():
            self._drained.clear()
            await self._drained.wait()
        await self._call(self._engine.pause)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._require("pause")
        await self._call(self._engine.resume)
        self._paused = False
        self._going.set()
        self._hold()

    async def profile(self, *, on: bool) -> None:
        """See `Engine.profile`."""
        self._require("profile")
        await self._call(self._engine.profile, on=on)

    def _hold(self) -> None:
        """Start new requests, or keep them waiting."""
        if self._asleep or self._paused:
            self._open.clear()
        else:
            self._open.set()

    async def _unsuspended(self) -> None:
        """Wait until running requests continue."""
        if not self._going.is_set():
            await self._going.wait()

    async def _call(self, method: Callable[..., Awaitable[T]], *arguments: Any, **named: Any) -> T:
        """Call a method of the class. Raises its `EngineError`s, and `EngineDied` for any other exception."""
        try:
            return await method(*arguments, **named)
        except EngineError:
            raise
        except Exception as error:
            self._fail(error)
            raise EngineDied(f"{self.name} failed: {type(error).__name__}: {error}") from error

    def _fail(self, error: BaseException, culprit: _Running | None = None) -> None:
        """The class's code raised, of `culprit` if it is known: log it once, and end all requests.

        The others are bystanders: the end of this engine does not count against them.
        """
        if self._failure is None:
            self._failure = error
            _log.error("engine_code_failed", engine=self.name, exc_info=error)
        detail = f"{self.name} failed: {type(error).__name__}: {error}"
        for running in list(self._requests.values()):
            finish: Finish = "fatal" if running is culprit else "error" if culprit is not None else "died"
            running.send(Step((), finish, detail=detail))
            if running.task is not None and running.task is not asyncio.current_task():
                running.task.cancel()

    def _abort_all(self) -> None:
        for request in list(self._requests):
            self.abort(request)

    def _busy(self) -> int:
        return sum(running.admitted for running in self._requests.values())


class CustomLauncher(EngineLauncher[Any]):
    """The launcher of a class with the two methods. Its options are a mapping, or a `NamedTuple` that its package's traits name."""

    def make(self, worker: WorkerSpec, files: ModelFiles) -> Engine:
        """See `EngineLauncher.make`."""
        kind = registry.load(self.entry)
        options = self.options if isinstance(self.options, dict) else self.options._asdict()
        setup = EngineSetup(
            worker.name,
            worker.role,
            Path(worker.model) if worker.model else None,
            files,
            worker.block_size or BLOCK_SIZE,
            worker.max_model_len,
            options,
        )
        try:
            engine = kind()
        except TypeError as error:
            raise EngineUnavailable(
                f"{self.entry.name}: {kind.__name__} is created without arguments: {error}; "
                "what it needs comes with `start`, as setup.options"
            ) from error
        return CustomEngine(self.entry.name, engine, setup)
