"""The state that a worker reports: its requests in flight (counted only here), its status over all incarnations, and its metrics."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headwater.actors.metrics import WORKER_COUNTERS, WORKER_GAUGES
from headwater.actors.worker.handoffs import Handoffs
from headwater.actors.worker.prefill_timer import PrefillTimer
from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.engine import EngineLoad, KvEvent, Step
from headwater.schemas.clock import Clock
from headwater.schemas.events import KvGap, Role, WorkerState
from headwater.schemas.inference import GenerateRequest, Refused
from headwater.schemas.tables import ENCODE_NEEDS, Capability, ServedPart

_TOKEN_BYTES = 4

ENDED_MAX = 4_096
"""Names remembered of requests that have ended."""


IMAGES_MAX = 4_096
"""Images remembered that the engine was given as pixels: it keeps what it computed of the latest ones."""


class Progress(NamedTuple):
    """Changes since the last report: fields of `LoadReported`."""

    accepted: tuple[str, ...] = ()
    prefilled: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    cached: tuple[int, ...] = ()
    prefills: tuple[tuple[int, int], ...] = ()
    step_us: int = 0
    gaps: int = 0
    encodes: tuple[tuple[int, int, int, int], ...] = ()
    outputs: tuple[tuple[int, int], ...] = ()
    reads: tuple[tuple[int, int], ...] = ()
    answered: tuple[tuple[int, int], ...] = ()


class LoadSource(Protocol):
    """The part of an engine that is read here."""

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        ...

    def is_waiting(self, request: str) -> bool:
        """Was a request accepted that the engine does not have yet?"""
        ...


class Inflight:
    """Requests that were accepted and have not ended, and the hand-offs that the worker keeps for others.

    A request of an earlier incarnation still counts as in flight while the engine has it, but is not reported any
    more: for the log it ended with its incarnation. `changed` is set when there is something to report.
    """

    def __init__(self, clock: Clock, engine: LoadSource, handoffs: Handoffs) -> None:
        self.changed = asyncio.Event()
        self.tokens = 0
        """Tokens generated so far, over all incarnations."""
        self.file_steps = 0
        """Denoising steps of images and videos, and their files, so far."""
        self.kv_events = 0
        """KV events of the engine so far: a long prompt fills blocks before its first token."""
        self.kv_gaps = 0
        """Gaps among them."""
        self.kv_event_at_s = 0.0
        """When the last of them came, in seconds of the Unix epoch; 0: none did."""
        self.kv_dropped = 0
        """Those that could not be queued for the log."""
        self.ended = 0
        """Requests that have ended so far."""
        self.reads_embeddings = False
        """Does it matter how long images take? Where an encode worker could encode them."""
        self._images: OrderedDict[str, None] = OrderedDict()
        self._clock = clock
        self._engine = engine
        self._handoffs = handoffs
        self._requests: dict[str, bool] = {}
        """The requests by name, and whether the present incarnation accepted each."""
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._settled = asyncio.Event()
        self.begin_incarnation()

    def begin_incarnation(self) -> None:
        """A new incarnation: it reports only the requests that it accepts itself."""
        self._requests = dict.fromkeys(self._requests, False)
        self._accepted: list[str] = []
        self._prefilled: list[str] = []
        self._finished: list[str] = []
        self._cached: list[int] = []
        self._outputs: list[tuple[int, int]] = []
        self._reads: list[tuple[int, int]] = []
        self._answered: list[tuple[int, int]] = []
        self.timer = PrefillTimer(self._clock.monotonic_s, self.tokens)

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._requests)

    def knows(self, request: str) -> bool:
        """Was it accepted before? Names of attempts are unique, so a message with one that is seen again is a copy, however late.

        A copy must not be accepted: the router has counted the first one's end, and would never stop counting the second.
        """
        return request in self._requests or request in self._ended

    @property
    def names(self) -> list[str]:
        """Names of the requests in flight."""
        return list(self._requests)

    @property
    def reported(self) -> list[str]:
        """Names of the requests in flight that the present incarnation accepted, in order of acceptance."""
        return [request for request, is_current in self._requests.items() if is_current]

    @property
    def handoffs(self) -> int:
        """Prompts whose KV is kept for other workers."""
        return len(self._handoffs)

    def is_current(self, request: str) -> bool:
        """Is a request in flight that the present incarnation accepted?"""
        return self._requests.get(request, False)

    def accept(self, request: GenerateRequest, *, fetches: bool) -> None:
        """The engine has the request. One that `fetches` its KV from another worker computes no prompt."""
        self._add(request.request)
        if not fetches:
            is_waiting = self._engine.is_waiting(request.request)
            tokens = len(request.tokens) // _TOKEN_BYTES
            self.timer.add_prompt(
                request.request,
                tokens,
                is_measurable=not is_waiting,
                images=self._images_to_encode(request) if self.reads_embeddings else (),
            )

    def _images_to_encode(self, request: GenerateRequest) -> list[tuple[int, int]]:
        """(end in the prompt, tokens) of each item of media that the engine encodes itself, for the first time."""
        images = []
        for item in request.media:
            if item.kind in ENCODE_NEEDS and item.data and item.given is None and item.id not in self._images:
                images.append((item.start + item.tokens, item.tokens))
                self._images[item.id] = None
        while len(self._images) > IMAGES_MAX:
            self._images.popitem(last=False)
        return images

    def note_read(self, tokens: int, seconds: float) -> None:
        """The embedding of an image with so many tokens was read from the worker that encoded it."""
        self._reads.append((tokens, max(1, round(seconds * 1e6))))

    def record_first_step(self, request: GenerateRequest, step: Step) -> None:
        """The first step of a request. A prefill leg's may come before its prompt is computed: see `finish`."""
        self._prefilled.append(request.request)
        self._cached.append(step.cached_tokens)
        self.changed.set()
        if request.leg != "prefill" and (step.tokens or step.finish in ("stop", "length")):
            self.timer.record_first_tokens(request.request, step.cached_tokens, len(step.tokens))

    def record_engine_step(self) -> None:
        """The engine completed a step."""
        self.timer.record_step()

    def finish(self, request: GenerateRequest, step: Step, tokens: int) -> None:
        """A request ended with this step, after `tokens` tokens in all."""
        if not self._remove(request.request):
            return
        if step.finish in ("stop", "length"):
            if request.leg == "prefill":
                self.timer.record_first_tokens(request.request, step.cached_tokens, decodes=False)
            else:
                self._outputs.append((request.sampling.max_tokens, tokens))
                self._answered.append((len(request.tokens) // _TOKEN_BYTES, request.tenant))
        load = self._engine.load()
        self.timer.end_request(request.request, load.running, load.waiting)

    def accept_embedding(self, request: str) -> None:
        """The engine has a pooling request, or one for images: it shares its time with the prompts."""
        self._add(request)
        self.timer.mark_doubtful()

    def finish_embedding(self, request: str) -> None:
        """A pooling request ended, or one for images."""
        if self._remove(request):
            self.timer.mark_doubtful()

    def accept_encoding(self, request: str, tokens: int) -> None:
        """Count an image of this many tokens that will be encoded: for the load it is a prompt without an answer."""
        self._add(request)
        self.timer.add_prompt(request, tokens, is_measurable=True)

    def note_encoded(self, request: str, cached_tokens: int) -> None:
        """Its embedding is there; `cached_tokens` of it were not computed."""
        if not self.is_current(request):
            return
        self._prefilled.append(request)
        self._cached.append(cached_tokens)
        self.timer.record_first_tokens(request, cached_tokens, decodes=False)
        self.changed.set()

    def finish_encoding(self, request: str) -> None:
        """The request has been answered."""
        if self._remove(request):
            self.timer.end_request(request, 0, 0)

    def _add(self, request: str) -> None:
        self._requests[request] = True
        self._accepted.append(request)
        self.changed.set()

    def _remove(self, request: str) -> bool:
        """Returns whether the present incarnation had accepted it."""
        is_current = self._requests.pop(request, False)
        self._ended[request] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        self.ended += 1
        self._settled.set()
        if is_current:
            self._finished.append(request)
            self.changed.set()
        return is_current

    def note_kv_events(self, events: Sequence[KvEvent]) -> None:
        """The engine published these KV events."""
        self.kv_events += len(events)
        self.kv_gaps += sum(isinstance(event, KvGap) for event in events)
        self.kv_event_at_s = self._clock.wall_ns() / 1e9

    def kv_stats(self) -> dict[str, float]:
        """Statistics of the engine's KV events."""
        return {
            "kv_events_total": self.kv_events,
            "kv_gaps_total": self.kv_gaps,
            "kv_dropped_total": self.kv_dropped,
            "kv_event_at_s": self.kv_event_at_s,
        }

    def note_closed_handoffs(self) -> None:
        """Hand-offs were closed: the worker may be drained now."""
        self._settled.set()

    def take_progress(self) -> Progress:
        """Return what changed since the last call, each change once."""
        progress = Progress(
            tuple(self._accepted),
            tuple(self._prefilled),
            tuple(self._finished),
            tuple(self._cached),
            *self.timer.take_measurements(self.tokens),
            tuple(self._outputs),
            tuple(self._reads),
            tuple(self._answered),
        )
        self._accepted, self._prefilled, self._finished, self._cached = [], [], [], []
        self._outputs, self._reads, self._answered = [], [], []
        return progress

    async def drained(self) -> None:
        """Return at a moment when no request is in flight and no hand-off is kept."""
        while self._requests or self.handoffs:
            self._settled.clear()
            await self._settled.wait()

    async def drained_within(self, within_s: float | None, abandoned: asyncio.Event) -> bool:
        """Wait until drained; False if that takes longer than `within_s`, or `abandoned` is set before."""
        drained = asyncio.create_task(self.drained(), name="drained")
        stop = asyncio.create_task(abandoned.wait(), name="drain abandoned")
        try:
            await asyncio.wait({drained, stop}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            return drained.done()
        finally:
            drained.cancel()
            stop.cancel()


# Status: what the worker publishes of itself, and whether it accepts requests.


class WorkerStatus:
    """Role, state, LoRA adapters and taints. Each change is published by the present incarnation, if there is one.

    `stopping` is set once the actor shuts down; `failure_reason` is set once the worker has failed.
    """

    def __init__(self, worker: str, profile: WorkerProfile, stopping: asyncio.Event) -> None:
        self.worker = worker
        self.instance = profile.instance
        self.tier = profile.tier
        self.embedding_format = profile.embedding_format
        self.revision = profile.revision
        self.endpoint = profile.endpoint
        self.role: Role = profile.role
        self.state: WorkerState = "ready"
        self.taints = profile.taints
        self.loras: tuple[str, ...] = ()
        self.lora_on_demand = False
        self.tokenizer = ""
        """The digest of its model's tokenizer; set once the model card is published."""
        self.media_processor = ""
        """The digest of the settings of its processor of media; set once the engine has started."""
        self.failure_reason = ""
        self.engine_death = ""
        """What the engine died of, from the moment that anything shows it; `engine_died` is then set."""
        self.engine_died = asyncio.Event()
        self.refused = 0
        """Requests that were refused because of the worker's state."""
        self.publish: Callable[[], None] | None = None
        """Has the present incarnation append the status to the pool log; None between two: a new one publishes it when it joins."""
        self._stopping = stopping

    @property
    def stopping(self) -> bool:
        """True once the actor shuts down."""
        return self._stopping.is_set()

    @property
    def is_serving(self) -> bool:
        """Is the engine expected to make progress on its requests?"""
        return not self.stopping and self.state in ("ready", "draining")

    def served_part(self, capabilities: frozenset[Capability]) -> ServedPart:
        """Return what the worker takes at present, with an engine of these capabilities."""
        if self.refusal():
            return ""
        if self.role == "encode":
            return "encode"
        if "split_only" not in capabilities:
            return "whole"
        return "decode" if self.role == "decode" else "prefill"

    @property
    def is_gone(self) -> bool:
        """Does this incarnation accept no request any more, whatever happens?"""
        return bool(self.failure_reason or self.engine_death or self.stopping)

    def refusal(self) -> str:
        """Why the worker accepts no request at present; "" if it does."""
        if self.failure_reason:
            return self.failure_reason
        if self.engine_death:
            return f"worker {self.worker}: {self.engine_death}"
        if self.stopping:
            return f"worker {self.worker} is shutting down"
        return "" if self.state == "ready" else f"worker {self.worker} is {self.state}"

    def refuse(self, reason: str, *, spent: bool = False) -> Refused:
        """The reply to a request that the worker does not take: another one may."""
        self.refused += 1
        return Refused(reason, True, spent, gone=self.is_gone)

    def note_engine_death(self, reason: str) -> None:
        """The engine has died: refuse requests from now on. `EngineHealth.run` then ends the worker."""
        if not self.engine_death:
            self.engine_death = reason or "its engine died"
            self.engine_died.set()

    def set_state(self, state: WorkerState) -> None:
        """Change the state."""
        if state != self.state:
            self.state = state
            self._publish()

    def set_role(self, role: Role) -> None:
        """Change the role."""
        if role != self.role:
            self.role = role
            self._publish()

    def set_taints(self, taints: tuple[str, ...]) -> None:
        """Change the taints."""
        if taints != self.taints:
            self.taints = taints
            self._publish()

    def set_loras(self, loras: tuple[str, ...]) -> None:
        """Change which LoRA adapters are loaded, by identity."""
        if loras != self.loras:
            self.loras = loras
            self._publish()

    def _publish(self) -> None:
        if self.publish is not None:
            self.publish()


# Metrics, computed from the worker's statistics on each scrape.

Stats = Callable[[], Mapping[str, Any]]


class WorkerCollector(Collector):
    """Collects from the workers of one process. `workers` returns the name and the statistics of each."""

    def __init__(self, workers: Callable[[], Iterable[tuple[str, Stats]]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        all_stats = [(name, stats()) for name, stats in self._workers()]
        for field, (metric, text) in WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(metric, text, labels=["worker"])
            for name, stats in all_stats:
                if field in stats:
                    gauge.add_metric([name], stats[field])
            yield gauge
        for field, (metric, text) in WORKER_COUNTERS.items():
            counter = CounterMetricFamily(metric, text, labels=["worker"])
            for name, stats in all_stats:
                if field in stats:
                    counter.add_metric([name], stats[field])
            yield counter
