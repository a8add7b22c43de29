"""Observation of TensorRT-LLM: its KV events and iteration statistics, which it keeps in bounded buffers, its health and its metrics.

Its metrics are in this process's registry, so the metrics port of the worker shows them with the worker's labels next to ours.
"""

import asyncio
import importlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import structlog

from headwater.engines import logs
from headwater.engines.engine import EngineUnavailable, KvEvent
from headwater.engines.tensorrt_llm.kv_events import EventTranslator
from headwater.engines.tensorrt_llm.recorded import PYTHONS
from headwater.engines.tensorrt_llm.sampling import TensorRtImages
from headwater.schemas.clock import Clock
from headwater.schemas.events.kv import BlocksCleared, BlocksStored

EVENTS_TIMEOUT_S: Final = 0.0
STATS_TIMEOUT_S: Final = 0.01
EVENTS_PAUSE_S: Final = (0.005, 0.02)
STATS_PAUSE_S: Final = (0.01, 0.1)
"""Shortest and longest pause while nothing comes; each is half as long again as the one before."""
GROWTH: Final = 1.5
BATCH_MAX: Final = 256
"""Events after which other tasks of the loop run."""

LOG_LEVEL: Final = "TLLM_LOG_LEVEL"

Fetch = Callable[[], AsyncIterator[dict[str, Any]]]
Take = Callable[[dict[str, Any]], None]


async def poll_once(fetch: Fetch, take: Take) -> int:
    """Take what there is; returns how much. Raises what TensorRT-LLM raises, but for an empty buffer."""
    count = 0
    try:
        async for item in fetch():
            if item:
                count += 1
                take(item)
            if count % BATCH_MAX == BATCH_MAX - 1:
                await asyncio.sleep(0)
    except (TimeoutError, asyncio.QueueEmpty):
        # Nothing, or nothing more.
        pass
    return count


async def poll(fetch: Fetch, take: Take, pause_s: tuple[float, float], clock: Clock) -> None:
    """Take what there is, again and again. Raises as `poll_once` does."""
    pause = pause_s[0]
    while True:
        count = await poll_once(fetch, take)
        pause = pause_s[0] if count else min(pause * GROWTH, pause_s[1])
        await clock.sleep(pause)


class RankState:
    """One attention data-parallel rank: its KV events, its statistics and its requests."""

    def __init__(
        self, number: int, block_size: int, slots: int, images: TensorRtImages | None = None
    ) -> None:
        self.number = number
        self.block_size = block_size
        self.slots = asyncio.Semaphore(slots)
        self.translator = EventTranslator(block_size, images)
        self.used_blocks = 0
        self.total_blocks = 0
        self._events: list[KvEvent] = []
        self._ready = asyncio.Event()

    def take_event(self, event: dict[str, Any]) -> None:
        """One event of TensorRT-LLM."""
        self._offer(self.translator.translate(event))

    def take_stats(self, stats: dict[str, Any]) -> None:
        """The statistics of one iteration."""
        cache = stats.get("kvCacheStats") or {}
        self.used_blocks = int(cache.get("usedNumBlocks", self.used_blocks))
        self.total_blocks = int(cache.get("maxNumBlocks", self.total_blocks))

    def clear(self) -> None:
        """All blocks are gone."""
        self.translator.forget()
        self._offer([BlocksCleared()])

    def _offer(self, events: list[KvEvent]) -> None:
        if events:
            self._events += events
            self._ready.set()

    async def events(self) -> AsyncIterator[list[KvEvent]]:
        """Our events as they come. One reader."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            events, self._events = self._events, []
            if events:
                yield events

    def held(self) -> list[BlocksStored]:
        """All blocks; pending events are dropped, as their result is included."""
        self._events = []
        return self.translator.held()


# Health, checked from a thread: a call to a rank that has died may block.

PERIOD_S = 1.0
ANSWER_S_MAX = 30.0
"""Longer than the stalls of ten seconds that it is known for (TensorRT-LLM 12640)."""


class Watchdog:
    """`verdict` is why the engine has died, "" if it has not."""

    def __init__(self, llm: Any, clock: Clock) -> None:
        self._llm = llm
        self._clock = clock
        self._stop = threading.Event()
        self._asked_s: float | None = None
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="TensorRT-LLM health", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """End, without waiting for a call that blocks."""
        self._stop.set()

    @property
    def verdict(self) -> str:
        """See the class."""
        asked_s = self._asked_s
        if not self._problem and asked_s is not None:
            waited = self._clock.monotonic_s() - asked_s
            if waited > ANSWER_S_MAX:
                return f"TensorRT-LLM has not answered a health check for {waited:.0f} s"
        return self._problem

    def _run(self) -> None:
        while not self._stop.is_set() and not self._problem:
            self._asked_s = self._clock.monotonic_s()
            try:
                self._problem = _unhealthy(self._llm)
            except Exception as error:
                self._problem = f"TensorRT-LLM's health check failed: {type(error).__name__}: {error}"
            self._asked_s = None
            self._stop.wait(PERIOD_S)


def _unhealthy(llm: Any) -> str:
    """Why it is not healthy; the first cause, if it keeps one."""
    check = getattr(llm, "_check_health", None)
    executor = getattr(llm, "_executor", None)
    if check is None:
        check = getattr(executor, "check_health", None)
    if check is None or check():
        return ""
    cause = getattr(executor, "_fatal_error", None)
    return f"TensorRT-LLM has died: {cause}" if cause else "TensorRT-LLM has died"


# TensorRT-LLM's own metrics (`trtllm_*`), filled from iterations and ended requests as by its server.

LABELS: Final = {"engine_type": "trtllm"}
"""Labels of each sample, as TensorRT-LLM's server has them, besides the model's name."""

_log = structlog.get_logger("headwater.tensorrt_llm")


class LibraryMetrics:
    """Its `MetricsCollector`. A release without it, and one that raises, costs the metrics and nothing else."""

    def __init__(self, model: str) -> None:
        self._collector = _collector(model)

    def take_iteration(self, stats: dict[str, Any]) -> None:
        """The statistics of one iteration. With attention data parallelism they are those of the rank that came last."""
        self._call("log_iteration_stats", stats)

    def take_result(self, result: Any) -> None:
        """A request that has ended: its times and finish reason, if the release measures them."""
        if measured := getattr(result, "metrics_dict", None):
            self._call("log_metrics_dict", measured)

    def _call(self, method: str, values: Any) -> None:
        call = getattr(self._collector, method, None)
        if call is None:
            return
        try:
            call(values)
        except Exception as error:
            _log.warning("engine_metrics_failed", method=method, reason=f"{type(error).__name__}: {error}")
            self._collector = None


@cache
def _collector(model: str) -> Any:
    """Return the collector of this process, whose metrics may be registered once. None without the class."""
    try:
        made = importlib.import_module("tensorrt_llm.metrics").MetricsCollector
        return made({"model_name": model, **LABELS})
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _log.warning(
            "engine_metrics_failed", method="MetricsCollector", reason=f"{type(error).__name__}: {error}"
        )
        return None


# The imports of TensorRT-LLM, in one place.

NAMES: Final = {
    "LLM": "tensorrt_llm",
    "SamplingParams": "tensorrt_llm",
    "GuidedDecodingParams": "tensorrt_llm.sampling_params",
    "DisaggregatedParams": "tensorrt_llm.disaggregated_params",
    "DisaggScheduleStyle": "tensorrt_llm.disaggregated_params",
    "SchedulingParams": "tensorrt_llm.scheduling_params",
    "LoRARequest": "tensorrt_llm.executor.request",
    "__version__": "tensorrt_llm",
    "from_numpy": "torch",
}


def not_installed(reason: str) -> str:
    """Return what to do about an import that failed for this reason."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"TensorRT-LLM cannot be imported ({reason}): install headwater's `trtllm` extra on Python {PYTHONS[-1]} "
        f"(it has wheels for {' and '.join(PYTHONS)}; this is {here})"
    )


def load_library() -> Any:
    """The classes by name. Raises `EngineUnavailable`: not installed, or a release without one of them.

    TensorRT-LLM, its processes and its native code read the level of their lines from the environment, when they are loaded.
    """
    if logs.is_configured():
        os.environ.setdefault(LOG_LEVEL, logs.level().upper())
    found: dict[str, Any] = {}
    for name, module in NAMES.items():
        try:
            found[name.strip("_")] = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise EngineUnavailable(not_installed(str(error))) from error
        except AttributeError as error:
            raise EngineUnavailable(f"this release of TensorRT-LLM has no {module}.{name}") from error
    return SimpleNamespace(**found)
