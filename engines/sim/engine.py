"""The simulated engine: a continuous-batching scheduler with a paged prefix cache and a step-time model.

It has chunked prefill, preemption of the newest request, prefix reuse, LRU eviction and real KV events, on a clock that is
passed in. Generated tokens depend only on the request's seed, its images and the token's position, so a request that migrates to
another worker continues with the same tokens.

A LoRA adapter is only a name: each has its own answers and cached blocks. Sleep and pause both stop the scheduler; sleep
also drops the cache. Vectors depend only on the tokens and on what the media show, and take the time of a prefill.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import ClassVar

import numpy as np

from headwater.engines.engine import (
    Emit,
    EncodedImage,
    Engine,
    EngineBase,
    EngineDied,
    EngineInfo,
    EngineLoad,
    KvEvent,
    LoraAdapter,
    PauseMode,
    Pinned,
    RequestRejected,
    SplitOnly,
    Step,
    Transfer,
    check_adapter,
    check_length,
    check_loaded,
    check_sleep,
)
from headwater.engines.kv_events import PendingKvEvents
from headwater.engines.launcher import EngineLauncher, WorkerSpec
from headwater.engines.media import check_media
from headwater.engines.model_files import ModelFiles
from headwater.engines.sim import BLOCK_SIZE, EMBEDDING_WIDTH, SimOptions
from headwater.engines.sim.cache import ImageStore, NoRoomForImage, PagedCache
from headwater.engines.sim.handoff import KvGone, SimHandoff
from headwater.engines.sim.model import FORM, SimEncoder, content_of, embedding_of, media_support, script
from headwater.engines.sim.scheduler import (
    SimScheduler,
    SimSequence,
    SimSettings,
    seed_of,
    sim_metrics,
    token_at,
)
from headwater.schemas import hashing
from headwater.schemas.clock import Clock, SystemClock
from headwater.schemas.events import BlocksStored
from headwater.schemas.inference import EmbedRequest, GenerateRequest
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import Capability, EmbeddingSupport, MediaSupport

DIMENSIONS = 64
TOKEN_BYTES = 4


LINGER_S = 60.0
"""How long an embedding that was given stays if no request uses it."""


class SimEngine(EngineBase):
    """See `headwater.engines.engine.Engine`."""

    name = "sim"
    capabilities: frozenset[Capability] = frozenset(
        {
            "generate",
            "seed",
            "cache_salt",
            "embed",
            "handoff",
            "lora",
            "sleep",
            "pause",
            "kv_events",
            "kv_dump",
            "clear_kv",
        }
    )

    possible: ClassVar[frozenset[Capability]] = frozenset(
        {"images", "videos", "audio", "image_embeddings", "encode"}
    )

    def __init__(self, settings: SimSettings, clock: Clock, handoff: SimHandoff | None = None) -> None:
        self._settings = settings
        self._clock = clock
        if settings.split_only:
            self.capabilities |= {"split_only"}
        self.capabilities |= settings.media.capabilities
        if settings.media.images is not None and settings.reads_embeddings:
            self.capabilities |= {"image_embeddings"}
        self._handoff = handoff or SimHandoff(settings.model, clock)
        self.choreography = self._handoff.choreography
        self.notices_fetches = self._handoff.is_shared
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._cache = PagedCache(settings.total_blocks)
        self._images = ImageStore(settings.embedding_tokens, clock.monotonic_s, LINGER_S)
        self._scheduler: SimScheduler[SimSequence] = SimScheduler(settings.limits, self._cache, self._images)
        self._by_id: dict[str, SimSequence] = {}
        self._work = asyncio.Event()
        self._events = PendingKvEvents()
        self._loop: asyncio.Task[None] | None = None
        self._pooling = 0
        """Pooling requests that have not ended."""
        self._pooling_turn = asyncio.Lock()
        self._loras: dict[str, LoraAdapter] = {}
        self._asleep = False
        self._paused: PauseMode | None = None
        self._awake = asyncio.Event()
        self._awake.set()
        self._drained = asyncio.Event()
        self._still = asyncio.Event()

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        settings = self._settings
        self._loop = asyncio.create_task(self._run(), name="sim-engine")
        return EngineInfo(
            settings.model,
            settings.block_size,
            settings.total_blocks,
            settings.sequences_max,
            settings.context_length,
            pairs_with=f"sim/{settings.model}",
            lora_slots=settings.lora_slots,
            lora_rank_max=settings.lora_rank_max,
            tasks=("embed",),
            media=settings.media,
            image_embeddings=EmbeddingSupport(width=EMBEDDING_WIDTH, dtype="float32", merge=1)
            if settings.accepts_embeddings and settings.media.images is not None
            else None,
        )

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`."""
        self._check_supported(request)
        if self._loop is not None and self._loop.done():
            raise EngineDied(f"the simulated scheduler ended: {self._loop}")
        if self._settings.split_only and request.leg == "decode" and transfer is None and request.edge:
            raise SplitOnly(self.name)
        check_loaded(request.lora_name, self._loras)
        tokens: list[int] = hashing.unpack_tokens(request.tokens).tolist()
        need = len(tokens) + request.sampling.max_tokens
        check_length(len(tokens), request.sampling.max_tokens, self._settings.context_length)
        if -(-need // self._settings.block_size) > self._settings.total_blocks:
            raise RequestRejected(f"{need} tokens do not fit the KV cache of this worker")
        check_media(tokens, request.media, self._settings.media)
        seed = seed_of(request, self._contents(request.media)) + hashing.seed(request.lora_name)
        low, high = self._settings.answer_tokens
        answer = low + hashing.chain_plain([seed & 0xFFFFFFFF], 1, 7)[0] % (high - low + 1)
        sequence = SimSequence.create(
            request, emit, tokens, seed, answer, self._settings.block_size, self._clock.monotonic_s()
        )
        self._by_id[request.request] = sequence
        if transfer is not None and request.leg == "decode":
            fetch = asyncio.get_running_loop().create_task(self._fetch(sequence, transfer))
            self._fetches[request.request] = fetch
            fetch.add_done_callback(lambda _: self._fetches.pop(request.request, None))
            return
        self._scheduler.waiting.append(sequence)
        self._work.set()
        if request.leg == "prefill" and self.choreography == "room":
            # Both legs run concurrently: the other engine waits in the room that this one opens now.
            asyncio.get_running_loop().call_soon(emit, Step((), pinned=self._pin(sequence, ())))

    def _contents(self, media: tuple[PromptMedia, ...]) -> list[int]:
        """Return what the media of a prompt show: of their values, or of images' embeddings if these were put here."""
        contents = []
        for item in media:
            content = content_of(embedding_of(item)) if item.data else self._images.content(item.id)
            if content is None or content < 0:
                # Real engines end on such a request.
                raise RequestRejected(
                    f"{item.kind} {item.id} came without its data, and its embedding is not here"
                )
            contents.append(content)
        return contents

    def holds_embedding(self, item: PromptMedia) -> bool:
        """See `Engine.holds_embedding`. Those that it computed itself do not count: nothing says for how long they are there."""
        content = self._images.content(item.id)
        return content is not None and content >= 0

    async def put_embedding(self, item: PromptMedia, image: EncodedImage) -> None:
        """See `Engine.put_embedding`."""
        if not self._settings.reads_embeddings:
            self._reject("image_embeddings")
        FORM.check(item, image)
        if not self._images.keep(item.id, item.tokens, content_of(image.values)):
            raise NoRoomForImage(f"the embeddings of {len(self._images)} images are in use")

    def _pin(self, sequence: SimSequence, first_tokens: tuple[int, ...]) -> Pinned:
        return self._handoff.pin(sequence.request, partial(self._let_go, sequence), first_tokens)

    def _let_go(self, sequence: SimSequence) -> None:
        """Release the blocks of a prefill leg."""
        if sequence.ended:
            self._scheduler.release(sequence)

    async def _fetch(self, sequence: SimSequence, transfer: Transfer) -> None:
        """Wait for the KV of a prompt that another engine computed, then continue from it."""
        try:
            fetched = await self._handoff.fetch(sequence.request, transfer)
        except KvGone as error:
            self._finish(sequence, Step((), "error", detail=str(error)))
            return
        if sequence.ended:
            return
        sequence.arrived, sequence.spoiled, sequence.cached_before = fetched
        self._scheduler.waiting.append(sequence)
        self._work.set()
        if transfer.first_tokens:
            sequence.append(transfer.first_tokens)
            self._emit(sequence, transfer.first_tokens, -1)

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`."""
        self._handoff.release(params)

    def abort(self, request: str) -> None:
        """See `Engine.abort`."""
        sequence = self._by_id.get(request)
        if sequence is not None:
            asyncio.get_running_loop().call_soon(self._finish, sequence, Step((), "abort"))

    def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """See `Engine.kv_events`."""
        return self._events.batches()

    def held_blocks(self) -> list[BlocksStored]:
        """See `Engine.held_blocks`."""
        self._cache.take_events()
        self._events.take()
        return self.cached_blocks()

    def cached_blocks(self) -> list[BlocksStored]:
        """The blocks of `held_blocks`, without removing pending events."""
        return [event for event in self._cache.held() if isinstance(event, BlocksStored)]

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        return EngineLoad(
            len(self._scheduler.running) + self._pooling,
            len(self._scheduler.waiting),
            self._cache.used,
            self._settings.total_blocks,
        )

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`."""
        self._cache.clear()
        self._publish_events()

    async def check(self) -> None:
        """See `Engine.check`."""
        if self._loop is not None and self._loop.done():
            raise EngineDied(f"the simulated scheduler ended: {self._loop}")

    async def stop(self) -> None:
        """See `Engine.stop`. Remaining requests are aborted."""
        self._abort_all()
        self._handoff.stop()
        ending = [*self._fetches.values(), *([self._loop] if self._loop is not None else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def load_lora(self, adapter: LoraAdapter) -> None:
        """See `Engine.load_lora`. The folder is not read."""
        settings = self._settings
        check_adapter(adapter, self._loras, settings.lora_slots, settings.lora_rank_max)
        self._loras[adapter.name] = adapter

    async def unload_lora(self, name: str) -> None:
        """See `Engine.unload_lora`. Unknown names are fine."""
        self._loras.pop(name, None)

    async def sleep(self, level: int) -> None:
        """See `Engine.sleep`."""
        check_sleep(level, asleep=self._asleep, busy=self._busy())
        self._asleep = True
        await self.clear_kv()
        self._hold()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._asleep = False
        self._hold()

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        self._paused = mode
        if mode == "abort":
            self._abort_all()
        elif mode == "wait":
            while self._busy():
                self._drained.clear()
                await self._drained.wait()
        self._hold()
        if mode == "keep" and self._busy():
            await self._still.wait()

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._paused = None
        self._hold()

    def _hold(self) -> None:
        """Run the scheduler, or stop it before its next step."""
        if self._admits:
            self._awake.set()
        else:
            self._awake.clear()

    async def _held_back(self) -> None:
        """Called before each step of the scheduler: waits while it is stopped."""
        if not self._awake.is_set():
            self._still.set()
            await self._awake.wait()
            self._still.clear()

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`. Vectors of length 1. One request after the other, next to what the scheduler runs."""
        if request.task != "embed":
            raise RequestRejected(f"{request.task!r} is not supported by this model; supported: embed")
        check_loaded(request.lora_name, self._loras)
        media = request.media or ((),) * len(request.prompts)
        pairs = zip(request.prompts, media, strict=True)
        vectors = tuple(self._vector(packed, items, request) for packed, items in pairs)
        tokens = sum(len(packed) for packed in request.prompts) // TOKEN_BYTES
        self._pooling += 1
        try:
            async with self._pooling_turn:
                await self._clock.sleep(self._settings.step_time.seconds(tokens, 0.0, decoding=False))
        finally:
            self._pooling -= 1
        return vectors

    def _vector(self, packed: bytes, media: tuple[PromptMedia, ...], request: EmbedRequest) -> bytes:
        tokens = hashing.unpack_tokens(packed)
        check_media(tokens.tolist(), media, self._settings.media)
        if not 0 < len(tokens) <= self._settings.context_length:
            raise RequestRejected(f"{len(tokens)} tokens; 1 to {self._settings.context_length} are possible")
        root = hashing.seed(request.lora_name)
        [state] = hashing.sequence_hashes(tokens, len(tokens), parent=root).tolist()
        shown = [content_of(embedding_of(item)) for item in media]
        vector = np.random.default_rng([state, *shown]).standard_normal(request.dimensions or DIMENSIONS)
        return (vector / np.linalg.norm(vector)).astype("<f4").tobytes()

    @property
    def _admits(self) -> bool:
        """May the scheduler start waiting requests?"""
        return self._paused is None and not self._asleep

    def _busy(self) -> int:
        return len(self._scheduler.running)

    def _abort_all(self) -> None:
        for sequence in list(self._by_id.values()):
            self._finish(sequence, Step((), "abort"))

    async def _run(self) -> None:
        while True:
            await self._held_back()
            if not self._scheduler.running and not self._scheduler.waiting:
                self._work.clear()
                await self._work.wait()
                continue
            self._handoff.expire()
            preempted = self._scheduler.preemptions
            plan = self._scheduler.plan(admits=self._admits)
            sim_metrics().preemptions.inc(self._scheduler.preemptions - preempted)
            self._note_begun(plan.chunks)
            used = self._cache.used / self._cache.capacity
            times = self._settings.step_time
            duration = times.seconds(plan.prompt_tokens, used, plan.emits) + times.encode_seconds(
                plan.encodes
            )
            await self._clock.sleep(duration)
            for sequence, count in plan.chunks:
                if not sequence.ended and not sequence.waiting:
                    self._advance(sequence, count)
            self._publish_events()

    def _note_begun(self, chunks: list[tuple[SimSequence, int]]) -> None:
        now_s = self._clock.monotonic_s()
        for sequence, _ in chunks:
            # A decode leg's prompt was computed elsewhere.
            prompt = 0 if sequence.request.leg == "decode" else sequence.target
            sequence.times.begin(now_s, prompt, min(prompt, sequence.cached))

    def _advance(self, sequence: SimSequence, count: int) -> None:
        if not self._scheduler.compute(sequence, count):
            return
        token = self._token(sequence)
        cached = -1 if sequence.produced else sequence.cached
        if cached >= 0 <= sequence.cached_before:
            # In a room the decode leg states what its prefill leg found.
            cached = sequence.cached_before
        if sequence.request.leg == "prefill":
            # Not part of an answer; it is passed on where the decode leg starts after it.
            sequence.first = (token,) if self.choreography == "opaque" else ()
            self._finish(sequence, Step((), "length", cached))
            return
        sequence.append((token,))
        self._emit(sequence, (token,), cached)

    def _emit(self, sequence: SimSequence, tokens: tuple[int, ...], cached: int) -> None:
        """Emit new tokens; the last of them may end the answer."""
        sequence.times.generate(self._clock.monotonic_s(), len(tokens))
        sampling = sequence.request.sampling
        step = Step(tokens, "", cached)
        if tokens[-1] == self._settings.eos_token_id or tokens[-1] in sampling.stop_token_ids:
            self._finish(sequence, step._replace(finish="stop"))
        elif sequence.produced >= sampling.max_tokens:
            self._finish(sequence, step._replace(finish="length"))
        else:
            sequence.emit(step)

    def _token(self, sequence: SimSequence) -> int:
        """The next token: a function of only the seed and the number of tokens of the answer."""
        number = sequence.request.emitted + sequence.produced
        sampling = sequence.request.sampling
        ends = not sampling.ignore_eos and self._settings.eos_token_id >= 0
        if ends and number >= sequence.answer and sequence.produced >= sampling.min_tokens:
            return self._settings.eos_token_id
        return token_at(self._settings.script, sequence.seed + sequence.spoiled, number)

    def _finish(self, sequence: SimSequence, step: Step) -> None:
        if sequence.ended:
            return
        sequence.ended = True
        if step.finish in ("stop", "length"):
            sequence.times.end(self._clock.monotonic_s(), sequence.produced)
        self._by_id.pop(sequence.request.request, None)
        self._scheduler.remove(sequence)
        fetch = self._fetches.get(sequence.request.request)
        if fetch is not None and not sequence.arrived:
            fetch.cancel()
        if sequence.request.leg == "prefill" and step.finish == "length":
            if self.choreography != "room":
                step = step._replace(pinned=self._pin(sequence, sequence.first))
            if not self._handoff.computed(sequence.request, step.cached_tokens):
                self._let_go(sequence)
        else:
            self._handoff.withdraw(sequence.request)
            self._let_go(sequence)
        self._drained.set()
        sequence.emit(step)

    def _publish_events(self) -> None:
        self._events.add(self._cache.take_events())


__all__ = ["SimEngine", "SimSettings"]


class SimLauncher(EngineLauncher[SimOptions]):
    """See `EngineLauncher`."""

    def known_block_size(self, worker: WorkerSpec) -> int:
        """See `EngineLauncher.known_block_size`."""
        return worker.block_size or BLOCK_SIZE

    def settings(self, worker: WorkerSpec, files: ModelFiles) -> SimSettings:
        """The settings of the engine. Its own model takes images; one of a folder has its tokenizer, and takes text."""
        return SimSettings(
            model=files.name,
            block_size=worker.block_size or BLOCK_SIZE,
            total_blocks=self.options.blocks,
            context_length=worker.max_model_len or files.context_length,
            step_time=self.options.step_time,
            script=script(files),
            eos_token_id=files.eos_token_ids[0] if files.eos_token_ids else -1,
            media=MediaSupport() if worker.model else media_support(),
            reads_embeddings=worker.reads_embeddings,
            accepts_embeddings=worker.accepts_embeddings,
            embedding_tokens=(worker.embeddings_mib << 20) // (4 * EMBEDDING_WIDTH),
        )

    def make(self, worker: WorkerSpec, files: ModelFiles) -> Engine:
        """See `EngineLauncher.make`."""
        settings = self.settings(worker, files)
        if worker.role == "encode":
            return SimEncoder(settings, SystemClock())
        return SimEngine(settings, SystemClock())
