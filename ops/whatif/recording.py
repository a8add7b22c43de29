"""A recorded run as a trace: the pool log has the decisions and the workers' measurements, the request log the results.

Step times are estimated from the measurements. A decision records the number of its prompt's blocks and their last hash. Workers announce
blocks with their parents, so the whole prompt is found by following parents from that last block to the start. Where that block was never
announced, only the matched part is known, and the rest is replaced by blocks that no other prompt has.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.engines.sim import StepTime
from headwater.engines.sim.scheduler import MediaSpan
from headwater.events.ports import Log
from headwater.ops.bench.trace import Trace, TraceRequest, own_hash
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.setup import Setup
from headwater.router.state import RouterState
from headwater.schemas.events import (
    BlocksStored,
    LoadReported,
    MediaPlace,
    RequestAccepted,
    RequestEnded,
    RequestRouted,
    RequestStarted,
    Role,
    WorkerChanged,
    WorkerJoined,
)
from headwater.schemas.hashing import ROOT, seed, unpack_hashes
from headwater.schemas.routing import Decision

SAMPLES_MIN = 8
"""The fewest measured prompts; with fewer, the simulator's default step times are used."""

SPREAD_MIN = 4
"""Minimum ratio of the longest sample to the shortest; below it only a constant can be fitted."""

BINS_MAX, BIN_MIN = 8, 12
QUICK = 20
"""Percentile of the time between tokens that is used as a step without a prompt in it."""


class Samples:
    """Measurements in load reports: (tokens, ms) of prompts, (share of blocks in use, ms) of tokens."""

    def __init__(self) -> None:
        self.prefills: list[tuple[float, float]] = []
        self.steps: list[tuple[float, float]] = []

    @property
    def share(self) -> float:
        """The largest share of blocks in use of all measurements of tokens."""
        return max((share for share, _ in self.steps), default=0.0)

    def take(self, report: LoadReported) -> None:
        """Add the measurements of a report."""
        self.prefills += [(float(tokens), us / 1000) for tokens, us in report.prefills if tokens > 0]
        if report.step_us and report.total_blocks:
            self.steps.append((report.used_blocks / report.total_blocks, report.step_us / 1000))


def fitted(samples: Samples, step_tokens: int = 8_192) -> StepTime | None:
    """Step times fitted to the samples by least squares; None for too few of them.

    A prompt's time includes one decode, that of its first token. Prompts longer than a step take several steps, and are
    excluded.
    """
    short = [pair for pair in samples.prefills if pair[0] <= step_tokens]
    if len(short) < SAMPLES_MIN:
        return None
    shares, gaps = _columns(samples.steps)
    decode = (0.0, *_line(*_least(shares, gaps))) if len(gaps) else (0.0, 0.0, 0.0)
    tokens, step_ms = _columns(short)
    at = float(np.median(shares)) if len(shares) else 0.0
    rest = np.maximum(0.0, step_ms - (decode[1] * at + decode[2]))
    return StepTime(_curve(tokens, rest), decode)


def _columns(pairs: list[tuple[float, float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    table = np.array(pairs, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _least(
    shares: NDArray[np.float64], gaps: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The short ones among samples of similar shares: prompts computed in between only make gaps longer."""
    order = np.argsort(shares, kind="stable")
    bins = np.array_split(order, max(1, min(BINS_MAX, len(order) // BIN_MIN)))
    middles = [float(np.median(shares[chosen])) for chosen in bins]
    quick = [float(np.percentile(gaps[chosen], QUICK)) for chosen in bins]
    return np.array(middles, np.float64), np.array(quick, np.float64)


def _curve(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float, float]:
    """A x^2 + b x + c, none of them negative: where the best curve has a negative one, the best line."""
    if x.max() >= SPREAD_MIN * x.min() and len(np.unique(x)) > 3:
        a, b, c = np.polyfit(x, y, 2)
        if min(a, b, c) >= 0:
            return float(a), float(b), float(c)
    return (0.0, *_line(x, y))


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """B x + c, neither negative; a constant where x says nothing."""
    if np.ptp(x) > 0.05 * max(1e-9, float(np.abs(x).max())) and len(np.unique(x)) > 2:
        b, c = np.polyfit(x, y, 1)
        if b >= 0 and c >= 0:
            return float(b), float(c)
        if c < 0:
            return float((x * y).sum() / (x * x).sum()), 0.0
    return 0.0, float(np.median(y))


MADE_UP = 1 << 40
"""Offset of the request numbers whose own blocks replace unknown ones; see `own_hash`."""


class Expected(NamedTuple):
    """Estimates in milliseconds from the arrival at the router on, so with the wait in its queue; -1 where it had none."""

    ttft_ms: float = -1.0
    itl_ms: float = -1.0
    e2e_ms: float = -1.0


class RequestResult(NamedTuple):
    """The result of a request: cached blocks of its prompt (-1: not reported), milliseconds.

    `itl_ms` is the mean time between two tokens, -1 for an answer that has none or is one of several. `expected` is what the router
    expected of the worker that it chose.
    """

    hit_blocks: int
    ttft_ms: float
    e2e_ms: float
    itl_ms: float = -1.0
    expected: Expected = Expected()


class Recording(NamedTuple):
    """A recorded run. `results` are the results of requests that succeeded, by their name in `trace`.

    Of the prompts `whole` are known completely, `partly` as far as they were matched, and `unknown` not at all. `left_out`
    decisions led to no answer. `fitted`: step times were estimated from the log, those of decoding with up to `measured_share` of a worker's blocks in use.
    """

    trace: Trace
    setup: Setup
    results: dict[str, RequestResult]
    whole: int
    partly: int
    unknown: int
    left_out: int
    fitted: bool
    measured_share: float = 0.0


class _Pool:
    """The contents of a pool log."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}
        self.decisions: dict[str, Decision] = {}
        self.joined: dict[str, WorkerJoined] = {}
        self.roles: dict[str, Role] = {}
        self.samples = Samples()

    def begin(self, state: RouterState) -> None:
        """Take who was there, and what was cached, where a log begins that lacks its start."""
        for worker in state.loads.workers.values():
            self.joined[worker.name] = WorkerJoined(
                worker.name,
                worker.epoch,
                "",
                worker.engine,
                worker.role,
                worker.block_size,
                worker.total_blocks,
                worker.max_running,
            )
            self.roles[worker.name] = worker.role
        blocks, parents = state.index.slab[0], state.index.slab[1]
        held = blocks != 0
        self.parents.update(zip(blocks[held].tolist(), parents[held].tolist(), strict=True))

    async def read(self, log: Log) -> None:
        async for piece in log.read(0, follow=False):
            for _, event in piece.events():
                self._take(event)

    def _take(self, event: object) -> None:
        match event:
            case BlocksStored():
                parent = event.parent
                for block in unpack_hashes(event.hashes).tolist():
                    self.parents[block] = parent
                    parent = block
            case Decision() if "encode" in event.constraints.needs:
                # Of an image: a leg of a request, as the run has its own.
                pass
            case Decision():
                self.decisions.setdefault(event.request, event)
            case WorkerJoined():
                self.joined[event.worker] = event
                self.roles[event.worker] = event.role
            case WorkerChanged():
                self.roles[event.worker] = event.role
            case LoadReported():
                self.samples.take(event)
            case _:
                pass

    def prompt(self, decision: Decision, number: int) -> tuple[list[int], int]:
        """The hashes of a prompt's full blocks, and how many of them are known."""
        chain = self._chain(decision.last, decision)
        if len(chain) != decision.blocks:
            chain = self._chain(decision.deepest, decision)
            if chain and decision.following and len(chain) < decision.blocks:
                chain.append(decision.following)
        made_up = [own_hash(MADE_UP + number, at) for at in range(len(chain), decision.blocks)]
        return chain + made_up, len(chain)

    def _chain(self, block: int, decision: Decision) -> list[int]:
        """The blocks from the start of a prompt to this one; none if they are not all known."""
        chain: list[int] = []
        while block in self.parents and len(chain) < decision.blocks:
            chain.append(block)
            block = self.parents[block]
        # A chain that ends elsewhere lacks its start: the log was purged, or the prompt has a salt.
        return chain[::-1] if block in (ROOT, seed(decision.constraints.lora_name)) else []


class _Requests:
    """The contents of a request log, by request and choice."""

    def __init__(self) -> None:
        self.choices: dict[str, int] = {}
        self.media: dict[str, tuple[MediaSpan, ...]] = {}
        self.first: dict[tuple[str, int], str] = {}
        self.started: dict[tuple[str, int], RequestStarted] = {}
        self.ended: dict[str, RequestEnded] = {}

    async def read(self, log: Log) -> None:
        async for piece in log.read(0, follow=False):
            for _, event in piece.events():
                match event:
                    case RequestAccepted():
                        self.choices[event.request] = event.choices
                        self.media[event.request] = tuple([_span(place) for place in event.media])
                    case RequestRouted() if not event.emitted_tokens:
                        # Later ones are the decode leg, or another worker after a failure.
                        self.first.setdefault((event.request, event.choice), event.attempt)
                    case RequestStarted():
                        self.started.setdefault((event.request, event.choice), event)
                    case RequestEnded():
                        self.ended[event.request] = event
                    case _:
                        pass


def _span(place: MediaPlace) -> MediaSpan:
    return MediaSpan(place.id, place.start, place.tokens, place.kind)


async def recording(
    name: str, pool_log: Log, request_log: Log, begins: RouterState | None = None
) -> Recording:
    """Read both logs; `begins` is the state with which a pool's log begins that lacks its start. Raises `ConfigError` if there is nothing to replay."""
    pool, requests = _Pool(), _Requests()
    if begins is not None:
        pool.begin(begins)
    await pool.read(pool_log)
    await requests.read(request_log)
    if not pool.decisions:
        raise ConfigError(f"the log of pool {name} has no decision: there is nothing to replay")
    size = _block_size(pool)
    timed_requests: list[tuple[int, TraceRequest]] = []
    results: dict[str, RequestResult] = {}
    completeness: Counter[str] = Counter()
    for (request, choice), attempt in requests.first.items():
        decision = pool.decisions.get(attempt)
        started, ended = requests.started.get((request, choice)), requests.ended.get(request)
        if decision is None or decision.constraints.leg or started is None or ended is None:
            continue
        hashes, sure = pool.prompt(decision, len(timed_requests))
        completeness["whole" if sure == decision.blocks else "partly" if sure else "unknown"] += 1
        if decision.prompt_tokens % size:
            hashes.append(own_hash(MADE_UP + len(timed_requests), decision.blocks))
        output = max(1, ended.completion_tokens // max(1, requests.choices.get(request, 1)))
        trace_request = TraceRequest(
            attempt,
            0,
            decision.prompt_tokens,
            output,
            tuple(hashes),
            size,
            session=decision.preferences.session,
            media=requests.media.get(request, ()),
        )
        timed_requests.append((decision.wall_ns, trace_request))
        if ended.reason in ("stop", "length") and not ended.migrations:
            alone = requests.choices.get(request, 1) == 1
            results[attempt] = _result(decision, started, ended, size, alone=alone)
    if not timed_requests:
        raise ConfigError(f"no decision of pool {name} led to an answer in the request log")
    timed_requests.sort(key=lambda pair: (pair[0], pair[1].name))
    first_ns = timed_requests[0][0]
    trace = Trace(
        f"log of {name}",
        tuple(trace_request._replace(arrival_ns=at - first_ns) for at, trace_request in timed_requests),
    )
    step_time = fitted(pool.samples)
    return Recording(
        trace,
        _setup(pool, size, step_time or StepTime()),
        results,
        completeness["whole"],
        completeness["partly"],
        completeness["unknown"],
        sum(not decision.constraints.leg for decision in pool.decisions.values()) - len(timed_requests),
        step_time is not None,
        pool.samples.share,
    )


def _result(
    decision: Decision, started: RequestStarted, ended: RequestEnded, size: int, *, alone: bool
) -> RequestResult:
    """What the log says of an answered request with blocks of this size; `alone`: it had one choice, whose token times are its own."""
    cached = started.cached_tokens
    blocks = cached // size if cached >= 0 else -1
    itl_ms = _itl_ms(started, ended) if alone else -1.0
    return RequestResult(blocks, started.ttft_ms, ended.duration_ms, itl_ms, _expected(decision))


def _expected(decision: Decision) -> Expected:
    chosen = decision.chosen
    e2e_ms = decision.e2e_ms(chosen)
    return Expected(
        decision.waited_ms + chosen.ttft_ms if chosen.prefill_ms else -1.0,
        chosen.itl_ms or -1.0,
        decision.waited_ms + e2e_ms if e2e_ms else -1.0,
    )


def _itl_ms(started: RequestStarted, ended: RequestEnded) -> float:
    """The mean time between two tokens of a request with one choice; -1 for a single token."""
    gaps = ended.completion_tokens - 1
    return (ended.duration_ms - started.ttft_ms) / gaps if gaps > 0 else -1.0


def _block_size(pool: _Pool) -> int:
    sizes = {joined.block_size for joined in pool.joined.values()}
    if len(sizes) != 1:
        raise ConfigError(f"workers of this log have blocks of {sorted(sizes)} tokens: one size is required")
    return sizes.pop()


def _setup(pool: _Pool, size: int, step_time: StepTime) -> Setup:
    """The settings of the run, as far as the log has them; the rest are the simulator's defaults."""
    decisions = list(pool.decisions.values())
    seen = {candidate.worker for decision in decisions for candidate in decision.candidates}
    encoders = [worker for worker, role in pool.roles.items() if role == "encode"]
    if any(decision.scored > len(decision.candidates) for decision in decisions):
        # Decisions of a large fleet name a few of its workers.
        seen |= pool.joined.keys() - set(encoders)
    roles = Counter(pool.roles.get(worker, "both") for worker in seen)
    joined = [pool.joined[worker] for worker in seen if worker in pool.joined] or list(pool.joined.values())
    return Setup(
        policy=Counter(one.preferences.policy for one in decisions).most_common(1)[0][0],
        workers=roles["both"],
        prefill_workers=roles["prefill"],
        decode_workers=roles["decode"],
        encode_workers=len(encoders),
        blocks=round(sum(one.total_blocks for one in joined) / len(joined)),
        block_size=size,
        weights=decisions[-1].weights,
        step_time=step_time,
        sequences=max(one.max_running for one in joined),
    )
