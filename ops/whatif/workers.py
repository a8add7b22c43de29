"""Workers on virtual time: the simulated engine's scheduler, cache and step times, driven by the caller; and encode legs.

Times are whole nanoseconds, so that equal steps simulated together end exactly when they would one by one. Of encode legs it is said which
images of a request an encode worker takes, and when their embeddings are at its worker.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from headwater.actors.worker.prefill_timer import PrefillTimer
from headwater.engines.embeddings import EmbeddingCache
from headwater.engines.engine import EncodedImage, KvEvent
from headwater.engines.sim import StepTime
from headwater.engines.sim.cache import ImageStore, PagedCache
from headwater.engines.sim.engine import LINGER_S
from headwater.engines.sim.scheduler import Limits, Scheduled, SimScheduler, StepPlan
from headwater.ops.bench.trace import TraceRequest, own_hash
from headwater.ops.whatif.routing import Routers, joined, route_query
from headwater.ops.whatif.setup import Setup, SpeedProfile, check_workers, profile_of
from headwater.router.encode_leg import weigh_encoding
from headwater.schemas.encode_requests import embedding_blocks, embedding_hashes
from headwater.schemas.events import LoadReported, Role
from headwater.schemas.hashing import tenant_digest
from headwater.schemas.inference import Leg
from headwater.schemas.media import PromptMedia
from headwater.schemas.routing import Constraints, Decision
from headwater.schemas.tables import Capability


class SimulatedRequest(Scheduled, kw_only=True, eq=False):
    """One request, or one leg of it, on `worker`. Times are nanoseconds; -1: not yet.

    A decode leg comes after its `prefill` leg. The request waits for `embeddings` of its images, and has waited `encoding_ns` for them.
    """

    name: str
    number: int
    request: TraceRequest
    leg: Leg
    worker: "SimWorker"
    prefill: "SimulatedRequest | None" = None
    embeddings: int = 0
    encoding_ns: int = 0
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
    """One engine. The caller begins a step (`begin`) and ends it when its time has passed (`finish`).

    It was `given` so many requests and legs. Its steps were scheduled `schedules` times: an event of an earlier schedule is void.
    """

    def __init__(self, shape: WorkerShape, number: int = 0, *, skip: bool = True) -> None:
        self.shape = shape
        self.number = number
        self.given = self.schedules = 0
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
        self.given += 1
        self._accepted.append(job.name)
        self._now_ns = now_ns
        self._reported_idle = False
        if job.leg != "decode":
            images = [
                (item.start + item.tokens, item.tokens)
                for item in job.media
                if self.reads_embeddings and item.id not in self.images
            ]
            self._timer.add_prompt(job.name, job.request.prompt_tokens, images=images)
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
            steps_left = min([job.request.output_tokens - job.produced for job, _ in plan.chunks])
            steps = speed.steps_until_change(now_ns, step_ns, min(steps_left, self.scheduler.alike(plan)))
        self.stretch = _Stretch(plan, now_ns, step_ns, steps)
        return True

    def finish(self) -> tuple[list[SimulatedRequest], list[KvEvent]]:
        """End the steps in progress, as their time has passed. Returns the requests that ended, and KV events for the log."""
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
            if job.leg == "prefill" or job.produced >= job.request.output_tokens:
                self._end(job, now_ns)
                done.append(job)
            else:
                job.length += 1
        return done, self.cache.take_events()

    def _end(self, job: SimulatedRequest, now_ns: int) -> None:
        job.done_ns, job.ended = now_ns, True
        self.scheduler.remove(job)
        self._timer.end_request(job.name, len(self.scheduler.running), len(self.scheduler.waiting))
        self._ended.append(job.name)
        if job.leg != "prefill":
            request = job.request
            self._outputs.append((request.output_tokens, job.produced))
            self._answered.append((request.prompt_tokens, tenant_digest(request.tenant)))
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
    worker_shapes = []
    for role, letter, count in counts:
        for number in range(count):
            name = f"{letter}{number:03d}"
            speed = profile_of(name, speeds[number % len(speeds)], setup.slowdowns)
            worker_shapes.append(
                WorkerShape(name, role, setup.blocks, limits, setup.step_time, speed, setup.embedding_tokens)
            )
    check_workers(setup.slowdowns, [shape.name for shape in worker_shapes])
    return worker_shapes


_NOTHING = EncodedImage(None, "float32")
"""Embeddings have no values here."""


class VirtualEncoder:
    """Keeps up to `blocks` blocks of embeddings. `encode_ns` is the time for an image of this many tokens.

    `computed` counts the images that it encoded, `found` those that it had, or was encoding, for another request.
    """

    def __init__(self, name: str, block_size: int, blocks: int, encode_ns: Callable[[int], int]) -> None:
        self.name = name
        self.blocks = blocks
        self.computed = self.found = 0
        self._encode_ns = encode_ns
        self._cache = EmbeddingCache(block_size, blocks)
        self._running: dict[str, tuple[int, int]] = {}
        """The images that are being encoded: when each will be, and its tokens."""
        self._accepted: list[str] = []
        self._ended: list[tuple[str, int]] = []
        self._measured: list[tuple[int, int]] = []

    def ahead(self, item: PromptMedia) -> int:
        """Tokens of images that are encoded before this one; 0 if it is at hand, or one of them."""
        if item.id in self._running or self._cache.find(item) is not None:
            return 0
        return sum(tokens for _, tokens in self._running.values())

    def accept(self, leg: str, item: PromptMedia, now_ns: int) -> int:
        """Encode an image for the decision `leg`; returns when its embedding is there."""
        self._accepted.append(leg)
        if item.id in self._running:
            self.found += 1
            return self._running[item.id][0]
        if self._cache.find(item) is not None:
            self.found += 1
            return now_ns
        self.computed += 1
        took_ns = self._encode_ns(item.tokens)
        end_ns = max([now_ns, *(end_ns for end_ns, _ in self._running.values())]) + took_ns
        self._running[item.id] = end_ns, item.tokens
        self._measured.append((item.tokens, took_ns // 1000))
        return end_ns

    def decline(self, leg: str) -> None:
        """The serving worker is the better one: what the router counted for the decision ends."""
        self._accepted.append(leg)
        self._ended.append((leg, -1))

    def finish(self, leg: str, item: PromptMedia, now_ns: int) -> None:
        """The embedding is there."""
        running = self._running.get(item.id)
        if running is not None and running[0] <= now_ns:
            del self._running[item.id]
            self._cache.keep(item, _NOTHING)
        self._ended.append((leg, 0))

    def take_events(self) -> list[KvEvent]:
        """Return what was kept and dropped since the last call."""
        return self._cache.events.take()

    def report(self) -> LoadReported:
        """The load report of this worker."""
        prefilled = [leg for leg, cached in self._ended if cached >= 0]
        report = LoadReported(
            running=len(self._running),
            waiting=0,
            used_blocks=self._cache.used_blocks,
            total_blocks=self.blocks,
            accepted=tuple(self._accepted),
            prefilled=tuple(prefilled),
            finished=tuple([leg for leg, _ in self._ended]),
            cached=(0,) * len(prefilled),
            prefills=tuple(self._measured),
        )
        self._accepted, self._ended, self._measured = [], [], []
        return report


# The encode workers, and the requests that wait for their embeddings.

GIVEN = 0
"""Here embeddings show nothing."""


class ActiveEncoding(NamedTuple):
    """An image at an encode worker until `ready_ns`, from where its embedding takes until `arrives_ns`."""

    leg: str
    item: PromptMedia
    encoder: VirtualEncoder
    job: SimulatedRequest
    ready_ns: int
    arrives_ns: int


class EncodeFleet:
    """The encode workers of a run. `declined` counts images left to their serving workers, `legs` those that were not."""

    def __init__(self, setup: Setup, routers: Routers) -> None:
        self._setup = setup
        self._routers = routers
        self._size = setup.block_size
        blocks = max(1, setup.embedding_tokens // setup.block_size)
        self.encoders = {
            name: VirtualEncoder(name, setup.block_size, blocks, setup.encode_ns)
            for name in (f"e{number:03d}" for number in range(setup.encode_workers))
        }
        self.declined = self.legs = 0

    @property
    def serving(self) -> tuple[Capability, ...]:
        """What the other workers announce. They say so only where there are encode workers, from which they must be distinguished."""
        return ("generate", "handoff", "kv_events") if self.encoders else ()

    def join(self, now_ns: int) -> None:
        """Announce the encode workers."""
        for encoder in self.encoders.values():
            event = joined(
                encoder.name,
                "encode",
                self._size,
                encoder.blocks,
                self._setup.sequences,
                capabilities=("encode", "kv_events"),
            )
            self._routers.send(encoder.name, now_ns, event)

    def begin(self, job: SimulatedRequest, decision: Decision, now_ns: int) -> Iterator[ActiveEncoding]:
        """The images of a request that encode workers take. `decision` is that of the request itself."""
        if not self.encoders:
            return
        cached = decision.chosen.cached_blocks * self._size
        routed: list[tuple[str, PromptMedia, str]] = []
        answers: list[Decision] = []
        in_turn = self._setup.encode_routing == "round_robin"
        for number, image in enumerate(job.media):
            if image.start + image.tokens > cached:
                item = PromptMedia("image", image.id, image.start, image.tokens, ())
                leg = f"{job.name}-e{number}"
                if in_turn:
                    routed.append((leg, item, self._next_encoder(len(routed))))
                    continue
                answer = self._route(leg, item, decision.worker, now_ns)
                if answer is not None:
                    answers.append(answer)
                    routed.append((leg, item, answer.worker))
        if not routed:
            return
        tokens = [item.tokens for _, item, _ in routed]
        estimate = weigh_encoding(job.name, tokens, answers, decision)
        for (leg, item, name), ahead_max in zip(routed, estimate.ahead_max, strict=True):
            encoder = self.encoders[name]
            if encoder.ahead(item) > ahead_max:
                self.declined += 1
                encoder.decline(leg)
                self._publish(encoder, now_ns)
                continue
            self.legs += 1
            ready_ns = encoder.accept(leg, item, now_ns)
            self._publish(encoder, now_ns)
            job.embeddings += 1
            arrives_ns = ready_ns + self._setup.embedding_ns(item.tokens)
            yield ActiveEncoding(leg, item, encoder, job, ready_ns, arrives_ns)

    def _next_encoder(self, number: int) -> str:
        """Return the encode worker of image `number` of a request; they take turns."""
        names = list(self.encoders)
        return names[(self.legs + self.declined + number) % len(names)]

    def _route(self, leg: str, item: PromptMedia, reader: str, now_ns: int) -> Decision | None:
        """Return what the router decides for an image; None if it has no encode worker."""
        tokens = embedding_blocks(item, self._size) * self._size
        hashes = embedding_hashes(item, self._size)
        wanted = Constraints(needs=("encode",))
        query = route_query(self._setup, leg, tokens, 0, hashes, wanted, reader=reader)
        answer = self._routers.offer(query, now_ns)
        return answer if isinstance(answer, Decision) else None

    def finish(self, active: ActiveEncoding, now_ns: int) -> None:
        """An embedding is there, and on its way."""
        active.encoder.finish(active.leg, active.item, now_ns)
        self._publish(active.encoder, now_ns)

    def deliver(self, active: ActiveEncoding) -> bool:
        """An embedding has arrived. True: it was the last that its request waited for."""
        job, item = active.job, active.item
        job.worker.images.keep(item.id, item.tokens, GIVEN)
        job.worker.add_read(item.tokens, active.arrives_ns - active.ready_ns)
        job.embeddings -= 1
        return not job.embeddings

    def _publish(self, encoder: VirtualEncoder, now_ns: int) -> None:
        events = encoder.take_events()
        if events:
            self._routers.send(encoder.name, now_ns, *events)
        if self._setup.encode_routing != "round_robin":
            self._routers.send(encoder.name, now_ns, encoder.report())
