"""The load of each worker as the log describes it: who is present, what was routed to it and what it finished.

Decisions and load reports have different writers, so a report may precede the decision that it refers to. Stages that arrive
early are kept until their decision arrives. So a router that applies its own decisions at once and a replay that reads
them from the log reach the same state.
"""

from collections.abc import Mapping

import msgspec

from headwater.router.columns import WorkerColumns
from headwater.router.estimates import (
    LEAST_MS,
    DecodeModel,
    EncodeTimes,
    OutputLengths,
    StepModel,
    learn_pace,
)
from headwater.router.worker import (
    ACCEPTED,
    DECIDED,
    FINISHED,
    PREFILLED,
    Active,
    Credit,
    RoutedPrompt,
    Worker,
    step_kind,
)
from headwater.schemas.events import (
    LoadReported,
    RequestsHeld,
    SplitSubject,
    TrafficSplit,
    WorkerChanged,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from headwater.schemas.routing import Decision, DecisionVoided

EARLY_MAX = 10_000
"""Early stages kept. Beyond, the oldest is dropped: its request then counts until the worker's next incarnation."""
LEFT_MAX = 4_096
"""Workers remembered after they left. One that rejoins later counts decisions from before it left."""


STEP_MEMORY = 8
"""The effective number of reports in the mean time between tokens."""


class Split(msgspec.Struct, frozen=True):
    """A traffic split that applies, and where and when the log stored it."""

    event: TrafficSplit
    position: int
    stored_ns: int


class Loads(msgspec.Struct, dict=True):
    """All workers, and the stages that arrived before their decision, by 'worker.epoch/request'.

    `steps` are prefill times by `step_kind`, over all its workers at pace 1. `left` maps a worker to the epoch that left last: a
    worker whose lease lapsed and was reclaimed rejoins under the same epoch. `engine_weights` are an operator's, by
    engine; empty: none are set. `splits` are the traffic splits that apply, by subject. `outputs` are the lengths of the pool's answers, and `encoding` the times of images by engine.
    """

    workers: dict[str, Worker] = {}
    early: dict[str, int] = {}
    steps: dict[str, StepModel] = {}
    credit: Credit = msgspec.field(default_factory=Credit)
    left: dict[str, int] = {}
    engine_weights: dict[str, float] = {}
    splits: dict[str, Split] = {}
    outputs: OutputLengths = msgspec.field(default_factory=OutputLengths)
    encoding: dict[str, EncodeTimes] = {}

    @property
    def columns(self) -> WorkerColumns:
        """The workers as arrays. No field: they follow from the others, and only a fold that decides has them."""
        cached: WorkerColumns | None = self.__dict__.get("columns_")
        if cached is None:
            cached = self.__dict__["columns_"] = WorkerColumns(self)
        return cached

    def _touch(self, worker: Worker, *, traits: bool = False) -> None:
        """The worker changed, perhaps in its traits: its row must be written again."""
        columns = self.__dict__.get("columns_")
        if columns is not None:
            columns.touched.add(worker.name)
            if traits:
                columns.changed.add(worker.name)

    def _restructure(self) -> None:
        """There are other workers, or other engines with step times: all rows must be written again."""
        columns = self.__dict__.get("columns_")
        if columns is not None:
            columns.stale = True

    def join(self, event: WorkerJoined, position: int = 0) -> bool:
        """A worker (re)starts empty at a log position. False if its epoch is not newer than the known one."""
        present = self.workers.get(event.worker)
        if present is not None and present.epoch >= event.epoch:
            return False
        self._drop_early(event.worker)
        if present is not None:
            self._drop_credit(present)
        self.workers[event.worker] = Worker(
            name=event.worker,
            epoch=event.epoch,
            engine=event.engine,
            role=event.role,
            block_size=event.block_size,
            total_blocks=event.total_blocks,
            max_running=event.max_running,
            lora_slots=event.lora_slots,
            capabilities=event.capabilities,
            pairs_with=event.pairs_with,
            instance=event.instance,
            tier=event.tier,
            taints=event.taints,
            tokenizer=event.tokenizer,
            media_processor=event.media_processor,
            revision=event.revision,
            rejoined=position if self.left.pop(event.worker, 0) == event.epoch else 0,
            pace=present.pace
            if present is not None
            else self._usual_pace(step_kind(event.engine, event.role)),
            decode_model=present.decode_model if present is not None else DecodeModel(),
        )
        self._restructure()
        return True

    def change(self, event: WorkerChanged) -> None:
        """A worker's state, role, LoRA adapters or taints changed."""
        worker = self.current(event.worker, event.epoch)
        if worker is not None:
            kind = worker.step_kind
            worker.state, worker.role, worker.loras = event.state, event.role, event.loras
            worker.taints = event.taints
            self._touch(worker, traits=True)
            if worker.step_kind != kind:
                self._restructure()

    def split(self, event: TrafficSplit, position: int, stored_ns: int) -> None:
        """Requests are split anew, unless the split that this one replaces applies no more."""
        present = self.splits.get(event.subject)
        if event.after == (present.position if present is not None else 0):
            self.splits[event.subject] = Split(event, position, stored_ns)

    def shares(self, subject: SplitSubject) -> Mapping[str, float]:
        """The shares that apply; empty without a split."""
        present = self.splits.get(subject)
        return present.event.shares if present is not None else {}

    def drain(self, event: WorkerDraining) -> None:
        """A worker takes no new requests."""
        worker = self.current(event.worker, event.epoch)
        if worker is not None:
            worker.draining = True
            self._touch(worker, traits=True)

    def leave(self, event: WorkerLeft) -> bool:
        """A worker left. False if that incarnation was not known."""
        worker = self.current(event.worker, event.epoch)
        if worker is None:
            return False
        self._drop_credit(worker)
        self._drop_early(event.worker)
        del self.workers[event.worker]
        self._restructure()
        self.left[event.worker] = event.epoch
        if len(self.left) > LEFT_MAX:
            del self.left[next(iter(self.left))]
        return True

    def _drop_early(self, worker: str) -> None:
        """Drop stages of ended incarnations: their decisions will find no worker."""
        for key in [key for key in self.early if key.startswith(f"{worker}.")]:
            del self.early[key]

    def _drop_credit(self, worker: Worker) -> None:
        for active in worker.requests.values():
            self.credit.drop(worker.name, active.assumed)
        for prompt in worker.expected.prompts.values():
            self.credit.drop(worker.name, prompt.hashes)

    def current(self, name: str, epoch: int) -> Worker | None:
        """The worker, if `epoch` is its present incarnation."""
        worker = self.workers.get(name)
        return worker if worker is not None and worker.epoch == epoch else None

    def decide(self, decision: Decision) -> None:
        """A request was routed to a worker."""
        worker = self.current(decision.worker, decision.epoch)
        if worker is not None and decision.position < worker.rejoined:
            # Made before the worker left: its router dropped it together with the worker.
            return
        stage = self.early.pop(f"{decision.worker}.{decision.epoch}/{decision.request}", DECIDED)
        if worker is None or decision.request in worker.requests:
            return
        self._touch(worker)
        if decision.assumed and not worker.announces:
            self._expect_blocks(worker, decision)
        if stage == FINISHED:
            return
        cached = decision.chosen.cached_blocks * worker.block_size
        computed = stage == PREFILLED or decision.leg == "decode"
        uncached = 0 if computed else max(0, decision.prompt_tokens - cached)
        blocks = -(-decision.prompt_tokens // worker.block_size)
        assumed = decision.assumed if worker.announces else b""
        worker.requests[decision.request] = Active(uncached, blocks, decision.wall_ns, stage, assumed)
        self.credit.add(worker.name, assumed)
        worker.prefill_tokens += uncached
        worker.decode_blocks += blocks
        if uncached:
            worker.computing[decision.request] = None
        if stage == DECIDED:
            worker.unaccepted[decision.request] = None

    def _expect_blocks(self, worker: Worker, decision: Decision) -> None:
        if decision.request in worker.expected.prompts:
            return
        new = decision.blocks - min(decision.chosen.cached_blocks, decision.blocks)
        prompt = RoutedPrompt(decision.wall_ns, new, decision.assumed)
        self.credit.add(worker.name, prompt.hashes)
        for evicted in worker.expected.add(decision.request, prompt, worker.total_blocks):
            self.credit.drop(worker.name, evicted.hashes)

    def void(self, event: DecisionVoided) -> None:
        """A decision stops counting, unless its worker accepted it."""
        worker = self.current(event.worker, event.epoch)
        if worker is None or event.request not in worker.unaccepted:
            return
        self._touch(worker)
        active = worker.requests.pop(event.request)
        del worker.unaccepted[event.request]
        worker.computing.pop(event.request, None)
        worker.prefill_tokens -= active.uncached_tokens
        worker.decode_blocks -= active.blocks
        self.credit.drop(worker.name, active.assumed)
        prompt = worker.expected.remove(event.request)
        if prompt is not None:
            self.credit.drop(worker.name, prompt.hashes)

    def report(
        self, name: str, epoch: int, event: LoadReported, wall_ns: int = 0, stored_ns: int = 0
    ) -> None:
        """A worker reported its load and the progress of its requests at `wall_ns` on its clock, stored at `stored_ns`."""
        worker = self.current(name, epoch)
        if worker is None:
            return
        self._touch(worker)
        if wall_ns and stored_ns:
            worker.observe_age(stored_ns - wall_ns)
        if event.prefilled:
            worker.reported_ns = max(worker.reported_ns, wall_ns)
        if event.prefills:
            self._learn_steps(worker, event.prefills)
        if event.encodes or event.reads or (event.prefills and worker.role == "encode"):
            self._learn_encoding(worker, event)
        if event.step_us:
            step_ms = event.step_us / 1000
            worker.step_ms += (step_ms - worker.step_ms) / (STEP_MEMORY if worker.step_ms else 1)
            # The report comes when requests changed: until then there were those of the report before.
            blocks = (worker.used_blocks + event.used_blocks) / 2
            worker.decode_model.observe(step_ms, max(1, worker.running), blocks, event.gaps)
        # What a worker writes is not trusted: unequal lists must not stop the fold.
        for (max_tokens, tokens), (prompt_tokens, tenant) in zip(event.outputs, event.answered, strict=False):
            self.outputs.observe(max_tokens, tokens, prompt_tokens, tenant)
        worker.running, worker.waiting = event.running, event.waiting
        worker.used_blocks, worker.total_blocks = event.used_blocks, event.total_blocks
        for request in event.accepted:
            self._advance(worker, request, ACCEPTED)
        for request in event.prefilled:
            self._advance(worker, request, PREFILLED)
        for request in event.finished:
            self._advance(worker, request, FINISHED)

    def _usual_pace(self, kind: str) -> float:
        """The median pace of the workers with the same step times, at which a new one is expected to be. 1 for the first.

        Where all become slower, that is partly in their paces, so 1 would make a new worker look faster than they are.
        """
        paces = sorted(worker.pace for worker in self.workers.values() if worker.step_kind == kind)
        return paces[len(paces) // 2] if paces else 1.0

    def _learn_steps(self, worker: Worker, prefills: tuple[tuple[int, int], ...]) -> None:
        """Measurements (tokens, µs) of a worker: they teach the step times of its kind and the worker's own pace."""
        shared = self._shared_steps(worker)
        for tokens, micros in prefills:
            if tokens > 0 and micros > 0:
                ms = micros / 1000
                if shared.learned:
                    observed = ms / shared.predict(tokens)
                    worker.pace, worker.outliers = learn_pace(worker.pace, observed, worker.outliers)
                shared.observe(tokens, ms / worker.pace)

    def _learn_encoding(self, worker: Worker, event: LoadReported) -> None:
        """Learn what images took: of an encode worker all that it computed, of others what a prompt with images took longer than without."""
        times = self.encoding.setdefault(worker.engine, EncodeTimes())
        if worker.role == "encode":
            for tokens, micros in event.prefills:
                times.apart.observe(tokens, micros / 1000)
        for tokens, micros in event.reads:
            times.reads.observe(tokens, micros / 1000)
        steps = self.steps.get(worker.engine)
        for computed, images, tokens, micros in event.encodes:
            if images > 0 and steps is not None and steps.learned:
                ms = max(LEAST_MS, micros / 1000 - worker.pace * steps.predict(computed))
                times.here.observe(tokens // images, ms / images)

    def _shared_steps(self, worker: Worker) -> StepModel:
        """The step times of the worker's kind, which the worker is about to teach."""
        kind = worker.step_kind
        shared = self.steps.get(kind)
        if shared is None:
            shared = self.steps[kind] = StepModel()
            self._restructure()
        columns = self.__dict__.get("columns_")
        if columns is not None:
            columns.taught.add(kind)
        return shared

    def hold(self, name: str, epoch: int, event: RequestsHeld) -> None:
        """A worker listed all its requests: accepted ones that are not listed have ended."""
        worker = self.current(name, epoch)
        if worker is None:
            return
        self._touch(worker)
        held = set(event.requests)
        for request, active in list(worker.requests.items()):
            if active.stage != DECIDED and request not in held:
                self._advance(worker, request, FINISHED)
        prefix = f"{name}.{epoch}/"
        for key in self.early:
            # Their decisions are not in the log yet.
            if key.startswith(prefix) and key[len(prefix) :] not in held:
                self.early[key] = FINISHED
        for request in event.requests:
            self._advance(worker, request, ACCEPTED)

    def _advance(self, worker: Worker, request: str, stage: int) -> None:
        active = worker.requests.get(request)
        if active is None:
            key = f"{worker.name}.{worker.epoch}/{request}"
            self.early[key] = max(stage, self.early.get(key, 0))
            if len(self.early) > EARLY_MAX:
                del self.early[next(iter(self.early))]
            return
        worker.unaccepted.pop(request, None)
        if stage >= PREFILLED:
            worker.prefill_tokens -= active.uncached_tokens
            active.uncached_tokens = 0
            worker.computing.pop(request, None)
        if stage == FINISHED:
            worker.decode_blocks -= active.blocks
            self.credit.drop(worker.name, active.assumed)
            del worker.requests[request]
        else:
            active.stage = max(active.stage, stage)
