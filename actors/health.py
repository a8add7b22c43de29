"""Is the engine alive? A canary before the worker registers, a probe whenever it is silent, and what follows a death.

    started   one request of one token must come back before anybody hears of this worker
    silent    with nothing to do: a canary again, each `idle_s`; two failures, or no answer in `probe_s`, is death
    busy      with requests but without a token for `stuck_s`: death

Seconds are counted while this process runs: one that was stopped, or a machine that slept, is not held against the
engine. A canary is shorter than a block and leaves nothing in the cache; its load is not reported.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import structlog

from headwater.actors.work import Work
from headwater.engines.engine import (
    Engine,
    EngineDied,
    EngineError,
    EngineInfo,
    EngineUnavailable,
    RequestRejected,
    Step,
)
from headwater.schemas.clock import Clock
from headwater.schemas.fleet import Role
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import EmbedRequest, GenerateRequest, Leg, Sampling

CHECK_PERIOD_S = 0.5
FAILURES_MAX = 2
WARM_UP_S_MAX = 60.0
CLEAR_S_MAX = 10.0
CLEAR_PERIOD_S = 0.1
PROMPT = (1,)
"""Of one token: any vocabulary has it, and with one new token it fills no block."""

_log = structlog.get_logger("headwater.health")


class HealthSettings(NamedTuple):
    """Seconds. `canary_s` for the first answer of a new engine; `idle_s` 0: no probes; `stuck_s` 0: never."""

    canary_s: float = 120.0
    idle_s: float = 10.0
    probe_s: float = 20.0
    stuck_s: float = 600.0


class EngineHealth:
    """See the module. `work` is what the engine has to do; `judged` is False while it owes nobody an answer."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        ids: Callable[[], str],
        settings: HealthSettings,
        work: Work,
        *,
        judged: Callable[[], bool],
    ) -> None:
        self.probing = False
        self._engine = engine
        self._clock = clock
        self._ids = ids
        self._settings = settings
        self._work = work
        self._tokens = 0
        self._had: set[str] = set()
        self._judged = judged
        self._quiet_s = 0.0
        self._failures = 0
        self._canary = ""
        self._still = 0
        self._lock = asyncio.Lock()

    def _gave(self) -> bool:
        """Did the engine give a token, or an end, since the last look?"""
        tokens, had = self._tokens, self._had
        self._tokens, self._had = self._work.tokens, self._work.requests
        return self._tokens != tokens or not had <= self._had

    async def first(self, info: EngineInfo, role: Role) -> None:
        """The canary of an engine that has just started; the cache is empty behind it.

        Raises `EngineUnavailable` if the engine refuses it, for it would refuse everything, and `EngineDied` if it
        fails or does not answer within `canary_s`: another start may help.
        """
        began = self._clock.monotonic_s()
        try:
            await self.canary(info, self._settings.canary_s)
        except RequestRejected as error:
            raise EngineUnavailable(
                f"the engine started but refuses a request of one token: {error}"
            ) from error
        if role != "both":
            await self._warm_up(info, role)
        if "clear_kv" in self._engine.capabilities:
            await self._clear()
        seconds = self._clock.monotonic_s() - began
        _log.info("engine_answers", engine=self._engine.name, seconds=round(seconds, 3))

    async def _clear(self) -> None:
        """Leave an empty cache. What the warm-up had pinned is let go of in a step of the engine's own."""
        until_s = self._clock.monotonic_s() + CLEAR_S_MAX
        while True:
            try:
                await self._engine.clear_kv()
                return
            except EngineDied:
                raise
            except EngineError as error:
                if self._clock.monotonic_s() >= until_s:
                    # What is cached is announced when the worker joins, so nothing is wrong but a few blocks less.
                    _log.warning("warm_up_left_blocks", reason=str(error))
                    return
            await self._clock.sleep(CLEAR_PERIOD_S)

    async def canary(self, info: EngineInfo, limit_s: float) -> None:
        """One tiny request through the engine. Raises `RequestRejected` or `EngineDied`."""
        capabilities = self._engine.capabilities
        if "generate" not in capabilities and "embed" in capabilities:
            step = await self._embed(info, limit_s)
        else:
            step = await self._ask("", PROMPT, limit_s)
        if step is None:
            raise EngineDied(f"the engine did not answer a request of one token within {limit_s:g} s")
        if step.finish in ("error", "abort"):
            raise EngineDied(f"the engine failed a request of one token: {step.detail or step.finish}")

    async def _warm_up(self, info: EngineInfo, role: Role) -> None:
        """The legs that this role serves, once, so that no client pays for what a first transfer sets up."""
        if "handoff" not in self._engine.capabilities:
            _log.warning("warm_up_skipped", role=role, reason=f"{self._engine.name} hands nothing over")
            return
        prompt = PROMPT * min(2 * info.block_size + 1, info.context_length - 1)
        try:
            step = await self._ask("prefill" if role == "prefill" else "decode", prompt, WARM_UP_S_MAX)
        except EngineError as error:
            _log.warning("warm_up_failed", role=role, reason=str(error))
            return
        if step is None or step.finish == "error":
            _log.warning("warm_up_failed", role=role, reason=step.detail if step else "it did not answer")

    async def _ask(self, leg: Leg, prompt: tuple[int, ...], limit_s: float) -> Step | None:
        """The last step of a request of our own; None if it does not come in time."""
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
                GenerateRequest(request, "", 0, pack_tokens(list(prompt)), sampling, leg=leg), emit
            )
            await self._wait(answer, limit_s)
        finally:
            self._canary = ""
            if not answer.done():
                self._engine.abort(request)
        for params in pinned:
            await self._engine.release(request, params)
        return answer.result() if answer.done() else None

    async def _embed(self, info: EngineInfo, limit_s: float) -> Step | None:
        task = info.tasks[0] if info.tasks else "embed"
        request = EmbedRequest(f"canary-{self._ids()}", (pack_tokens(list(PROMPT)),), task)
        work = asyncio.ensure_future(self._engine.embed(request))
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
        """Until the answer is there, or this process has run for `limit_s`. Raises `EngineDied`."""
        waited = 0.0
        while waited < limit_s and not answer.done():
            piece = min(CHECK_PERIOD_S, limit_s - waited)
            await asyncio.wait({answer}, timeout=piece)
            waited += piece
            if not answer.done():
                await self._engine.check()

    async def run(self, info: EngineInfo) -> None:
        """Watch the engine for ever. Raises `EngineDied`."""
        while True:
            await self._clock.sleep(CHECK_PERIOD_S)
            await self._engine.check()
            self._quiet_s += CHECK_PERIOD_S
            if self._gave() or not self._judged():
                self._quiet_s, self._failures = 0.0, 0
                continue
            running, settings = len(self._work), self._settings
            if running and 0 < settings.stuck_s <= self._quiet_s:
                raise EngineDied(
                    f"no token for {self._quiet_s:.0f} s although {running} requests run: the engine is stuck"
                )
            if not running and 0 < settings.idle_s <= self._quiet_s:
                await self._probe(info)

    async def _probe(self, info: EngineInfo) -> None:
        """One canary; a request that comes meanwhile ends the test, and is watched itself."""
        if self._lock.locked() or self._still:
            return
        async with self._lock:
            self.probing = True
            try:
                await self.canary(info, self._settings.probe_s)
            except (EngineDied, RequestRejected) as error:
                await self._engine.check()
                if len(self._work) or self._still or not self._judged():
                    self._quiet_s = 0.0
                    return
                self._failures += 1
                late = "did not answer" in str(error)
                _log.warning("probe_failed", reason=str(error), failures=self._failures)
                if late or self._failures >= FAILURES_MAX:
                    raise EngineDied(f"{error} (health probe)") from error
                # Asked again at the next look.
                return
            finally:
                self.probing = False
        self._quiet_s, self._failures = 0.0, 0

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Nothing of ours is in the engine inside, and nothing is asked of it."""
        self._still += 1
        try:
            if self._canary:
                self._engine.abort(self._canary)
            async with self._lock:
                yield
        finally:
            self._still -= 1
            self._quiet_s = 0.0
