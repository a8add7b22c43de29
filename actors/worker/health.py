"""The health of an engine: a canary request before the worker joins, probes while it is idle, and a watch for stalls.

    started   a request of one token, or for the smallest image in one step, must succeed before the worker is published
    idle      the canary again, each `idle_s`; two failures, or no answer within `probe_s`: the engine has died
    busy      requests in flight but no token, and no block of a prompt, for `stuck_s`: the engine has died

Only seconds in which this process ran count: a process that was stopped, or a machine that was suspended, is not held
against the engine. A canary is shorter than a block and leaves nothing in the cache; its load is not reported.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import structlog

from headwater.actors.worker.inflight import Inflight, WorkerStatus
from headwater.actors.worker.settings import HealthSettings
from headwater.engines.engine import (
    FAILURES,
    Engine,
    EngineDied,
    EngineError,
    EngineInfo,
    EngineUnavailable,
    RequestRejected,
    Step,
)
from headwater.schemas.clock import Clock
from headwater.schemas.events import Role
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import (
    EmbedRequest,
    GenerateRequest,
    ImageRequest,
    Leg,
    Sampling,
    VideoRequest,
)
from headwater.schemas.media import VALUE_BYTES, PromptMedia
from headwater.schemas.tables import ImageGenerationSupport, SpeechSupport, VideoGenerationSupport

CHECK_PERIOD_S = 0.5
FAILURES_MAX = 2
WARM_UP_S_MAX = 60.0
CLEAR_S_MAX = 10.0
CLEAR_PERIOD_S = 0.1
SIZES = ("block_size", "total_blocks", "max_running")
"""What an engine must report of itself: fields that are positive in the event by which its worker joins."""
PROMPT = (1,)
"""One token: in any vocabulary, and with one generated token it fills no block."""

SILENCE_S = 0.1
"""What a model that transcribes is probed with."""

_log = structlog.get_logger("headwater.health")


class EngineHealth:
    """The checks of one engine. `probing` is True while a probe is in the engine."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        ids: Callable[[], str],
        settings: HealthSettings,
        inflight: Inflight,
        status: WorkerStatus,
    ) -> None:
        self.probing = False
        self._engine = engine
        self._clock = clock
        self._ids = ids
        self._settings = settings
        self._inflight = inflight
        self._status = status
        self._seen = (0, 0, 0, 0)
        self._quiet_s = 0.0
        self._failures = 0
        self._canary = ""
        self._suspended = 0
        self._lock = asyncio.Lock()

    def _made_progress(self) -> bool:
        """Did the engine generate a token, fill or evict a block, compute a step of an image or end a request since the last call?"""
        inflight = self._inflight
        before, self._seen = (
            self._seen,
            (inflight.tokens, inflight.kv_events, inflight.file_steps, inflight.ended),
        )
        return self._seen != before

    async def check_started(self, info: EngineInfo, role: Role) -> None:
        """The canary of an engine that has just started; the cache is empty after it.

        Raises `EngineUnavailable` if the engine rejects it, as it would reject every request, or reports sizes that no
        router accepts, and `EngineDied` if it fails or does not answer within `canary_s`: another start may succeed.
        """
        for size in SIZES:
            if getattr(info, size) < 1:
                raise EngineUnavailable(
                    f"the engine reports {size}={getattr(info, size)}: its start must return at least 1"
                )
        began = self._clock.monotonic_s()
        try:
            await self.canary(info, self._settings.canary_s)
        except RequestRejected as error:
            raise EngineUnavailable(
                f"the engine started but rejects a request of one token: {error}"
            ) from error
        if role in ("prefill", "decode"):
            await self._warm_up(info, role)
        if "clear_kv" in self._engine.capabilities:
            await self._clear()
        seconds = self._clock.monotonic_s() - began
        _log.info("engine_checked", engine=self._engine.name, seconds=round(seconds, 3))

    async def _clear(self) -> None:
        """Clear the cache. The engine unpins the blocks of the warm-up only in a later step."""
        until_s = self._clock.monotonic_s() + CLEAR_S_MAX
        while True:
            try:
                await self._engine.clear_kv()
                return
            except EngineDied:
                raise
            except EngineError as error:
                if self._clock.monotonic_s() >= until_s:
                    # Cached blocks are announced when the worker joins: the cost is a few blocks.
                    _log.warning("warm_up_left_blocks", reason=str(error))
                    return
            await self._clock.sleep(CLEAR_PERIOD_S)

    @property
    def _canary_leg(self) -> Leg:
        """What an engine that serves no whole request is probed with."""
        if "split_only" not in self._engine.capabilities:
            return ""
        return "decode" if self._status.role == "decode" else "prefill"

    async def canary(self, info: EngineInfo, limit_s: float) -> None:
        """Run one request of one token. Raises `RequestRejected` or `EngineDied`."""
        capabilities = self._engine.capabilities
        if "encode" in capabilities:
            # It encoded a probe image when it started; a later failure is its process's, which `check` sees.
            await self._engine.check()
            return
        if "generate" not in capabilities and "embed" in capabilities:
            step = await self._embed_canary(info, limit_s)
        elif "generate" not in capabilities and info.image_generation is not None:
            step = await self._image_canary(info.image_generation, limit_s)
        elif "generate" not in capabilities and info.video_generation is not None:
            step = await self._video_canary(info.video_generation, limit_s)
        else:
            prompt, media = (PROMPT, ()) if info.speech is None else silence(info.speech)
            step = await self._generate_canary(self._canary_leg, prompt, limit_s, media)
        if step is None:
            raise EngineDied(f"the engine did not answer a request of one token within {limit_s:g} s")
        if step.finish in FAILURES or step.finish == "abort":
            raise EngineDied(f"the engine failed a request of one token: {step.detail or step.finish}")

    async def _warm_up(self, info: EngineInfo, role: Role) -> None:
        """Run the leg that this role serves once, so that no client waits for the set-up of the first transfer."""
        if "handoff" not in self._engine.capabilities:
            _log.warning("warm_up_skipped", role=role, reason=f"{self._engine.name} has no hand-off")
            return
        prompt = PROMPT * min(2 * info.block_size + 1, info.context_length - 1)
        try:
            step = await self._generate_canary(
                "prefill" if role == "prefill" else "decode", prompt, WARM_UP_S_MAX
            )
        except EngineError as error:
            _log.warning("warm_up_failed", role=role, reason=str(error))
            return
        if step is None or step.finish in FAILURES:
            _log.warning("warm_up_failed", role=role, reason=step.detail if step else "it did not answer")

    async def _generate_canary(
        self, leg: Leg, prompt: tuple[int, ...], limit_s: float, media: tuple[PromptMedia, ...] = ()
    ) -> Step | None:
        """The last step of a canary; None if it does not come within `limit_s`."""
        self._canary = request = f"canary-{self._ids()}"
        answer: asyncio.Future[Step] = asyncio.get_running_loop().create_future()
        pinned = []

        def emit(step: Step) -> None:
            if step.pinned is not None:
                pinned.append(step.pinned.params)
            if step.finish and not answer.done():
                answer.set_result(step)

        sampling = Sampling(1, temperature=0.0, ignore_eos=True)
        try:
            self._engine.submit(
                GenerateRequest(request, "", 0, pack_tokens(list(prompt)), sampling, leg=leg, media=media),
                emit,
            )
            await self._wait(answer, limit_s)
        finally:
            self._canary = ""
            if not answer.done():
                self._engine.abort(request)
        for params in pinned:
            await self._engine.release(request, params)
        return answer.result() if answer.done() else None

    async def _embed_canary(self, info: EngineInfo, limit_s: float) -> Step | None:
        task = info.tasks[0] if info.tasks else "embed"
        request = EmbedRequest(f"canary-{self._ids()}", (pack_tokens(list(PROMPT)),), task)
        return await self._canary_answer(self._engine.embed(request), limit_s)

    async def _image_canary(self, support: ImageGenerationSupport, limit_s: float) -> Step | None:
        """The smallest image, in one step; from a black one, for a model that only changes images."""
        side = support.side_min
        request = ImageRequest(f"canary-{self._ids()}", "", side, side, steps=1, seed=0)
        if "image_generation" not in self._engine.capabilities:
            black = PromptMedia("image", "canary", 0, 0, (side, side, 3), bytes(side * side * 3))
            request = msgspec.structs.replace(request, images=(black,))
        return await self._canary_answer(self._engine.generate_images(request, lambda _: None), limit_s)

    async def _video_canary(self, support: VideoGenerationSupport, limit_s: float) -> Step | None:
        """The smallest video of one frame, in one step."""
        side = support.side_min
        request = VideoRequest(
            f"canary-{self._ids()}", "", side, side, frames=1, fps=support.fps, steps=1, seed=0
        )
        return await self._canary_answer(self._engine.generate_video(request, lambda _: None), limit_s)

    async def _canary_answer(self, answer: Coroutine[Any, Any, Any], limit_s: float) -> Step | None:
        """Return how a canary ended; None if it does not end within `limit_s`."""
        work = asyncio.ensure_future(answer)
        try:
            await self._wait(work, limit_s)
            if not work.done():
                return None
            try:
                work.result()
            except RequestRejected:
                raise
            except EngineError as error:
                return Step((), "error", detail=str(error))
            return Step((), "stop")
        finally:
            work.cancel()

    async def _wait(self, answer: "asyncio.Future[Any]", limit_s: float) -> None:
        """Wait for the answer, or until this process has run for `limit_s`. Raises `EngineDied`."""
        waited = 0.0
        while waited < limit_s and not answer.done():
            piece = min(CHECK_PERIOD_S, limit_s - waited)
            await asyncio.wait({answer}, timeout=piece)
            waited += piece
            if not answer.done():
                await self._engine.check()

    async def run(self, info: EngineInfo) -> None:
        """Watch the engine until it dies. Raises `EngineDied`."""
        while True:
            await self._pause()
            await self._engine.check()
            self._quiet_s += CHECK_PERIOD_S
            if self._made_progress() or not self._status.is_serving:
                self._quiet_s, self._failures = 0.0, 0
                continue
            running, settings = len(self._inflight), self._settings
            if running and 0 < settings.stuck_s <= self._quiet_s:
                raise EngineDied(
                    f"no token and no block for {self._quiet_s:.0f} s with {running} requests in flight: the engine is stuck"
                )
            if not running and 0 < settings.idle_s <= self._quiet_s:
                await self._probe(info)

    async def _pause(self) -> None:
        """Wait for the next check. Raises `EngineDied` as soon as a request shows that the engine is dead."""
        died = asyncio.create_task(self._status.engine_died.wait(), name="engine died")
        pause = asyncio.create_task(self._clock.sleep(CHECK_PERIOD_S), name="health period")
        try:
            await asyncio.wait({died, pause}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            died.cancel()
            pause.cancel()
        if self._status.engine_death:
            raise EngineDied(self._status.engine_death)

    async def _probe(self, info: EngineInfo) -> None:
        """Run one canary. A request that arrives in the meantime cancels its verdict, and is watched itself."""
        if self._lock.locked() or self._suspended:
            return
        async with self._lock:
            self.probing = True
            try:
                await self.canary(info, self._settings.probe_s)
            except (EngineDied, RequestRejected) as error:
                await self._engine.check()
                if len(self._inflight) or self._suspended or not self._status.is_serving:
                    self._quiet_s = 0.0
                    return
                self._failures += 1
                late = "did not answer" in str(error)
                _log.warning("probe_failed", reason=str(error), failures=self._failures)
                if late or self._failures >= FAILURES_MAX:
                    raise EngineDied(f"{error} (health probe)") from error
                # Repeated at the next check.
                return
            finally:
                self.probing = False
        self._quiet_s, self._failures = 0.0, 0

    @contextlib.asynccontextmanager
    async def suspended(self) -> AsyncIterator[None]:
        """No canary is in the engine within this context, and none is submitted."""
        self._suspended += 1
        try:
            if self._canary:
                self._engine.abort(self._canary)
            async with self._lock:
                yield
        finally:
            self._suspended -= 1
            self._quiet_s = 0.0


def silence(speech: SpeechSupport) -> tuple[tuple[int, ...], tuple[PromptMedia, ...]]:
    """The canary of a model that transcribes."""
    prompt, samples = (speech.start, speech.no_timestamps), round(SILENCE_S * speech.rate_hz)
    data = bytes(samples * VALUE_BYTES["recording"])
    return prompt, (PromptMedia("recording", "silence", 0, len(prompt), (samples,), data),)
