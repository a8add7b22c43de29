"""Observation of TensorRT-LLM: its KV events and iteration statistics, which it keeps in bounded buffers, its health and its metrics.

KV events become ours for one attention data-parallel rank each.

    {"event_id": 7, "window_size": 4096, "attention_dp_rank": 0, "data": {"type": "stored", "parent_hash": …, "blocks": […]}}

They are numbered: a missing number means that blocks were stored or removed which
no event will report again. Then its cached blocks are unknown, and those known so far count as gone. Only events of the
largest attention window are followed: those of sliding layers come and go while the prefix stays reusable.

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

import msgspec
import numpy as np
import structlog

from headwater.engines import logs
from headwater.engines.engine import EngineUnavailable, KvEvent
from headwater.engines.kv_events import PendingKvEvents
from headwater.engines.tensorrt_llm.config import PYTHONS
from headwater.engines.tensorrt_llm.sampling import BlockImages, TensorRtImages
from headwater.schemas import hashing
from headwater.schemas.clock import Clock
from headwater.schemas.events import CPU, GPU, BlocksCleared, BlocksRemoved, BlocksStored, KvGap

_log = structlog.get_logger("headwater.tensorrt_llm")


class _Block(msgspec.Struct):
    hash: int
    parent: int
    tier: int


class EventTranslator:
    """One rank's events in order. `block_size` in tokens; `images` are the engine's, None for a model of text."""

    def __init__(self, block_size: int, images: TensorRtImages | None = None) -> None:
        self._size = block_size
        self._images = images
        self._blocks: dict[int, _Block] = {}
        """The blocks by TensorRT-LLM's hash."""
        self._partial: set[int] = set()
        self._expected: int | None = None
        self._window = 0

    def translate(self, event: dict[str, Any]) -> list[KvEvent]:
        """Our events for one of its."""
        events: list[KvEvent] = []
        number = int(event["event_id"])
        if self._expected is not None and number != self._expected:
            events += self._lost(number - self._expected)
        self._expected = number + 1
        window = int(event.get("window_size") or 0)
        data = event["data"]
        if data["type"] == "created":
            self._window = max(self._window, window)
            return events
        if window and self._window and window != self._window:
            return events
        match data["type"]:
            case "stored":
                events += self._stored(data)
            case "removed":
                events += self._removed(data["block_hashes"])
            case "updated":
                events += self._updated(data)
        return events

    def held(self) -> list[BlocksStored]:
        """All blocks, parents before children."""
        return [_stored(block.parent, [block.hash], block.tier) for block in self._blocks.values()]

    def forget(self) -> None:
        """No block is held any more."""
        self._blocks.clear()
        self._partial.clear()

    def _lost(self, missing: int) -> list[KvEvent]:
        _log.warning("kv_events_lost", missing=missing)
        self.forget()
        return [KvGap(max(missing, 1)), BlocksCleared()]

    def _stored(self, data: dict[str, Any]) -> list[KvEvent]:
        parent_id = data.get("parent_hash")
        if parent_id is None:
            parent = hashing.seed(data.get("lora_name") or "", data.get("cache_salt") or "")
        elif parent_id in self._blocks:
            parent = self._blocks[parent_id].hash
        else:
            # It follows a block from before a gap, or one that is not full.
            return []
        events: list[KvEvent] = []
        run: list[int] = []
        first, tier = parent, GPU
        for block in data["blocks"]:
            tokens = [int(token["token_id"]) for token in block["tokens"]]
            if len(tokens) < self._size:
                self._partial.add(block["block_hash"])
                break
            earlier = self._blocks.get(block["block_hash"])
            if earlier is not None:
                # Stored a second time: the run so far ends here.
                events += [_stored(first, run, tier)] if run else []
                parent = first = earlier.hash
                run = []
                continue
            named = self._resolve(tokens, block)
            if named is None:
                # What follows has no known parent either.
                _log.info("kv_blocks_of_unknown_media", blocks=len(data["blocks"]) - len(run))
                break
            [number] = hashing.sequence_hashes(
                np.array(named.tokens, np.uint32),
                self._size,
                parent=parent,
                multimodal=[(0, hashing.media_digest(image, start)) for image, start, _ in named.images],
            ).tolist()
            tier = CPU if block.get("cache_level") else GPU
            self._blocks[block["block_hash"]] = _Block(number, parent, tier)
            run.append(number)
            parent = number
        return events + ([_stored(first, run, tier)] if run else [])

    def _resolve(self, tokens: list[int], block: dict[str, Any]) -> BlockImages | None:
        """A block's tokens and images as the edge names them; None for images that this engine has no request of."""
        keys = block.get("mm_keys") or ()
        if not keys:
            return BlockImages(tokens, [])
        return self._images.resolve(tokens, keys) if self._images is not None else None

    def _removed(self, hashes: list[int]) -> list[KvEvent]:
        events: list[KvEvent] = []
        for block_hash in hashes:
            if block_hash in self._partial:
                self._partial.discard(block_hash)
                continue
            block = self._blocks.pop(block_hash, None)
            if block is not None:
                events.append(BlocksRemoved(_packed([block.hash]), block.tier))
        return events

    def _updated(self, data: dict[str, Any]) -> list[KvEvent]:
        block = self._blocks.get(data["block_hash"])
        level = data.get("cache_level")
        if block is None or not level:
            return []
        tier = CPU if level["new_value"] else GPU
        if tier == block.tier:
            return []
        before, block.tier = block.tier, tier
        return [_stored(block.parent, [block.hash], tier), BlocksRemoved(_packed([block.hash]), before)]


def _stored(parent: int, hashes: list[int], tier: int) -> BlocksStored:
    return BlocksStored(parent, _packed(hashes), tier)


def _packed(hashes: list[int]) -> bytes:
    return hashing.pack_hashes(np.array(hashes, np.uint64))


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
        self._events = PendingKvEvents()

    def take_event(self, event: dict[str, Any]) -> None:
        """One event of TensorRT-LLM."""
        self._events.add(self.translator.translate(event))

    def take_stats(self, stats: dict[str, Any]) -> None:
        """The statistics of one iteration."""
        cache = stats.get("kvCacheStats") or {}
        self.used_blocks = int(cache.get("usedNumBlocks", self.used_blocks))
        self.total_blocks = int(cache.get("maxNumBlocks", self.total_blocks))

    def clear(self) -> None:
        """All blocks are gone."""
        self.translator.forget()
        self._events.add([BlocksCleared()])

    def events(self) -> AsyncIterator[list[KvEvent]]:
        """Our events as they come. One reader."""
        return self._events.batches()

    def held(self) -> list[BlocksStored]:
        """All blocks; pending events are dropped, as their result is included."""
        self._events.take()
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
        collector_class = importlib.import_module("tensorrt_llm.metrics").MetricsCollector
        return collector_class({"model_name": model, **LABELS})
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
    python_version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"TensorRT-LLM cannot be imported ({reason}): install headwater's `trtllm` extra on Python {PYTHONS[-1]} "
        f"(it has wheels for {' and '.join(PYTHONS)}; this is {python_version})"
    )


def load_library() -> Any:
    """The classes by name. Raises `EngineUnavailable`: not installed, or a release without one of them.

    TensorRT-LLM, its processes and its native code read the level of their lines from the environment, when they are loaded.
    """
    if logs.is_configured():
        os.environ.setdefault(LOG_LEVEL, logs.level().upper())
    classes: dict[str, Any] = {}
    for name, module in NAMES.items():
        try:
            classes[name.strip("_")] = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise EngineUnavailable(not_installed(str(error))) from error
        except AttributeError as error:
            raise EngineUnavailable(f"this release of TensorRT-LLM has no {module}.{name}") from error
    return SimpleNamespace(**classes)
