"""Workers on virtual time: the simulated engine's scheduler, cache and step times, driven by the caller.

Times are whole nanoseconds, so that equal steps simulated together end exactly when they would one by one.
"""

from typing import NamedTuple

from headwater.actors.worker.prefill_timer import PrefillTimer
from headwater.engines.engine import KvEvent
from headwater.engines.sim.cache import ImageStore, PagedCache
from headwater.engines.sim.defaults import StepTime
from headwater.engines.sim.engine import LINGER_S
from headwater.engines.sim.scheduler import Limits, Scheduled, SimScheduler, StepPlan
from headwater.ops.whatif.routing import EPOCH
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.speed import SpeedProfile, check_workers, profile_of
from headwater.ops.whatif.trace import own_hash
from headwater.schemas.events.fleet import LoadReported, Role
from headwater.schemas.messages.inference import Leg


class SimulatedRequest(Scheduled, kw_only=True, eq=False):
    """One request, or one leg of it, on a worker. Times are nanoseconds; -1: not yet."""

    name: str
    number: int
    leg: Leg
    prompt_tokens: int
    output_tokens: int
    tenant: int = 0
    given_ns: int = -1
    began_ns: int = -1
    first_ns: int = -1
    done_ns: int = -1

    def hash_blocks(self, count: int, size: int) -> None:
        """See `Scheduled.hash_blocks`. Blocks with generated tokens are never shared."""
        while len(self.hashes) < count:
            self.hashes.append(own_hash(self.number, len(self.hashes)))


class WorkerShape(NamedTuple):
    """Role, capacity and speed of a worker. `step_time` is that of speed 1, `embedding_tokens` what it keeps of images."""

    name: str
    role: Role
    blocks: int
    limits: Limits
    step_time: StepTime
    speed: SpeedProfile = SpeedProfile()
    embedding_tokens: int = 0


class RequestOutcome(NamedTuple):
    """The outcome of a step: requests that ended, and KV events for the log."""

    done: list[SimulatedRequest]
    kv: list[KvEvent]


class _Stretch(NamedTuple):
    """`steps` equal steps of `step_ns`, begun at `began_ns`."""

    plan: StepPlan[SimulatedRequest]
    began_ns: int
    step_ns: int
    steps: int

    @property
    def end_ns(self) -> int:
        return self.began_ns + self.steps * self.step_ns


class SimWorker:
    """One engine. The caller begins a step (`begin`) and ends it when its time has passed (`finish`)."""

    def __init__(self, shape: WorkerShape, *, skip: bool = True) -> None:
        self.shape = shape
        self.epoch = EPOCH
        self.cache = PagedCache(shape.blocks)
        self.images = ImageStore(shape.embedding_tokens, lambda: self._now_ns / 1e9, LINGER_S)
        self.scheduler: SimScheduler[SimulatedRequest] = SimScheduler(shape.limits, self.cache, self.images)
        self.stretch: _Stretch | None = None
        self.computed_tokens = 0
        self.encoded = 0
        """Images."""
        self.reads_embeddings = False
        """Are there encode workers, so that it matters how long images take?"""
        self.stored_blocks = 0
        self.reported_ns = 0
        self._reported_idle = False
        self._skip = skip
        self._accepted: list[str] = []
        self._prefilled: list[SimulatedRequest] = []
        self._ended: list[str] = []
        self._outputs: list[tuple[int, int]] = []
        self._answered: list[tuple[int, int]] = []
        self._reads: list[tuple[int, int]] = []
        self._now_ns = 0
        # The timer that a real worker measures with.
        self._timer = PrefillTimer(lambda: self._now_ns / 1e9)
        self._token_ns = self._tokens = self._counted = 0

    def submit(self, job: SimulatedRequest, now_ns: int) -> bool:
        """Accept a request. True: the steps in progress now end earlier than scheduled."""
        self._accepted.append(job.name)
        self._now_ns = now_ns
        self._reported_idle = False
        if job.leg != "decode":
            images = [
                (item.start + item.tokens, item.tokens)
                for item in job.media
                if self.reads_embeddings and item.id not in self.images
            ]
            self._timer.add_prompt(job.name, job.prompt_tokens, images=images)
        self.scheduler.waiting.append(job)
        return self.cut(now_ns)

    def add_read(self, tokens: int, took_ns: int) -> None:
        """Note for the next report how long an image's embedding took to read."""
        self._reads.append((tokens, max(1, took_ns // 1000)))

    def cut(self, now_ns: int) -> bool:
        """Something changed: of equal steps taken together, those that have not begun are dropped. True: some were."""
        stretch = self.stretch
        if stretch is None:
            return False
        steps = (now_ns - stretch.began_ns) // stretch.step_ns + 1
        if steps >= stretch.steps:
            return False
        self.stretch = stretch._replace(steps=steps)
        return True

    def begin(self, now_ns: int) -> bool:
        """Plan and begin a step, unless one is in progress. False: there is nothing to do, or no space for it."""
        if self.stretch is not None or not (self.scheduler.running or self.scheduler.waiting):
            return False
        plan = self.scheduler.plan()
        if not plan.chunks:
            return False
        used = self.cache.used / self.cache.capacity
        speed = self.shape.speed
        times = self.shape.step_time
        seconds = times.seconds(plan.prompt_tokens, used, plan.emits) / speed.at(now_ns)
        if plan.encodes:
            seconds += times.encode_seconds(plan.encodes) / speed.at(now_ns)
            self.encoded += len(plan.encodes)
        step_ns = max(1, round(seconds * 1e9))
        steps = 1
        if plan.prompt_tokens:
            for job, _ in plan.chunks:
                if job.began_ns < 0:
                    job.began_ns = now_ns
        elif self._skip and not self.cache.changed:
            # (Evictions for this step are published when it ends, not later.)
            left = min([job.output_tokens - job.produced for job, _ in plan.chunks])
            steps = speed.steps_until_change(now_ns, step_ns, min(left, self.scheduler.alike(plan)))
        self.stretch = _Stretch(plan, now_ns, step_ns, steps)
        return True

    def finish(self) -> RequestOutcome:
        """End the steps in progress: their time has passed."""
        assert self.stretch is not None
        plan, _, step_ns, steps = self.stretch
        self._now_ns = now_ns = self.stretch.end_ns
        self._count_tokens(now_ns)
        self._counted = 0
        self.stretch = None
        self.computed_tokens += plan.prompt_tokens
        done: list[SimulatedRequest] = []
        if plan.emits:
            self._timer.record_step()
        size = self.shape.limits.block_size
        for job, count in plan.chunks:
            if steps > 1:
                job.length += steps - 1
                count = steps
            computed = job.computed + count
            if computed // size == len(job.blocks):
                # No block is full now, which is all that the scheduler would look for.
                job.computed = computed
            else:
                self.scheduler.compute(job, count)
            if computed < job.length:
                continue
            if job.first_ns < 0:
                job.first_ns = now_ns
                self._prefilled.append(job)
                self._timer.record_first_tokens(job.name, job.cached, decodes=job.leg != "prefill")
            elif plan.prompt_tokens:
                self._token_ns += step_ns
                self._tokens += 1
            job.produced += steps
            if job.leg == "prefill" or job.produced >= job.output_tokens:
                self._end(job, now_ns)
                done.append(job)
            else:
                job.length += 1
        return RequestOutcome(done, self.cache.take_events())

    def _end(self, job: SimulatedRequest, now_ns: int) -> None:
        job.done_ns, job.ended = now_ns, True
        self.scheduler.remove(job)
        self._timer.end_request(job.name, len(self.scheduler.running), len(self.scheduler.waiting))
        self._ended.append(job.name)
        if job.leg != "prefill":
            self._outputs.append((job.output_tokens, job.produced))
            self._answered.append((job.prompt_tokens, job.tenant))
            self.scheduler.release(job)

    def release(self, job: SimulatedRequest) -> None:
        """Release the blocks of a prefill leg whose KV was transferred."""
        self._reported_idle = False
        self.scheduler.release(job)

    def _count_tokens(self, now_ns: int) -> None:
        """Count the tokens of steps that have ended and were not counted yet."""
        stretch = self.stretch
        if stretch is None or stretch.plan.prompt_tokens:
            return
        ended = (now_ns - stretch.began_ns) // stretch.step_ns
        tokens = (ended - self._counted) * len(stretch.plan.chunks)
        self._token_ns += tokens * stretch.step_ns
        self._tokens += tokens
        self._counted = ended

    @property
    def moved(self) -> bool:
        """Has a request changed its stage since the last report?"""
        return bool(self._accepted or self._prefilled or self._ended)

    def regular_report(self, now_ns: int) -> LoadReported | None:
        """The report of another second; None for a worker that is idle since the last one, as it folds to the same state."""
        if self._reported_idle:
            self.reported_ns = now_ns
            return None
        # The first one after the work also has the measurements that were still open when the last request ended.
        scheduler = self.scheduler
        self._reported_idle = not (self.stretch or scheduler.running or scheduler.waiting)
        return self.report(now_ns)

    def report(self, now_ns: int) -> LoadReported:
        """The load report of this worker."""
        self.reported_ns = now_ns
        self._now_ns = now_ns
        self._count_tokens(now_ns)
        measured = self._timer.take_measurements(0)
        report = LoadReported(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            used_blocks=self.cache.used,
            total_blocks=self.cache.capacity,
            accepted=tuple(self._accepted),
            prefilled=tuple([job.name for job in self._prefilled]),
            finished=tuple(self._ended),
            cached=tuple([job.cached for job in self._prefilled]),
            prefills=measured.prefills,
            step_us=self._token_ns // self._tokens // 1000 if self._tokens else 0,
            gaps=self._tokens,
            outputs=tuple(self._outputs),
            encodes=measured.encodes,
            reads=tuple(self._reads),
            answered=tuple(self._answered),
        )
        self._reads, self._answered = [], []
        self._accepted, self._prefilled, self._ended, self._outputs = [], [], [], []
        self._token_ns = self._tokens = 0
        return report


def shapes(setup: Setup) -> list[WorkerShape]:
    """The workers of a column's fleet. Raises `ConfigError` for a slowdown of another worker."""
    limits = Limits(setup.block_size, setup.step_tokens, setup.sequences)
    counts: list[tuple[Role, str, int]] = [
        ("both", "w", setup.workers),
        ("prefill", "p", setup.prefill_workers),
        ("decode", "d", setup.decode_workers),
    ]
    speeds = setup.worker_speeds
    found = []
    for role, letter, count in counts:
        for number in range(count):
            name = f"{letter}{number:03d}"
            speed = profile_of(name, speeds[number % len(speeds)], setup.slowdowns)
            found.append(
                WorkerShape(name, role, setup.blocks, limits, setup.step_time, speed, setup.embedding_tokens)
            )
    check_workers(setup.slowdowns, [shape.name for shape in found])
    return found
