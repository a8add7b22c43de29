"""`headwater why-not REQUEST WORKER`: what would have had to differ for the request to go to that worker.

Why a decision did not choose it (what kept it from being a candidate, or what it would have cost more) is pure: `standing_of`, `compare`,
`sentences`.
"""

import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.debug.places import PoolLog, earliest, nearest_state, open_log
from headwater.ops.history.explanation import CostTerms, cost_terms
from headwater.ops.history.requests import StoredDecision, decisions_in, is_attempt_of
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.operator.log_reading import ID_FORM, check_id, decisions_after, make_again
from headwater.ops.terminal import Progress, fields_of
from headwater.router.candidates import FILTERS, shares_for
from headwater.router.decide import CannotRecompute, constraints_of
from headwater.router.load import Loads
from headwater.router.replay import Difference, Key, Reconstruction, Recorded
from headwater.router.state import RouterState
from headwater.router.worker import Traits, state_of
from headwater.schemas.events import RequestRouted, RequestStepped, WorkerJoined, WorkerLeft
from headwater.schemas.routing import Candidate, Constraints, Decision
from headwater.schemas.subjects import ANY, pool_subject

NEGLIGIBLE: Final = 0.005
"""Differences of cost below this are not told."""


class Obstacle(msgspec.Struct, frozen=True):
    """Something that keeps a worker from being chosen, whatever it would cost. `name` is a filter's, or one of ours."""

    name: str
    text: str


class Standing(NamedTuple):
    """A worker as a decision found it. `present`: it was in the pool; `cold`: its cached blocks did not count."""

    present: bool
    epoch: int = 0
    engine: str = ""
    cold: bool = False
    obstacles: tuple[Obstacle, ...] = ()
    revision: str = ""


def standing_of(state: RouterState, loads: Loads, worker: str, decision: Decision) -> Standing:
    """The worker on the state that the decision was made on. `loads` are those of its router."""
    member = loads.workers.get(worker)
    if member is None:
        return Standing(False)
    try:
        constraints = constraints_of(loads, decision)
    except CannotRecompute:
        constraints = decision.constraints
    obstacles: list[Obstacle] = []
    if constraints.pinned and constraints.pinned != worker:
        obstacles.append(Obstacle("pinned", f"the request was for worker {constraints.pinned} only"))
    for condition in FILTERS:
        if condition.applies(constraints) and not condition.keeps(member.traits, constraints):
            obstacles.append(Obstacle(condition.name, TEXTS[condition.name](member.traits, constraints)))
    if f"{worker}.{member.epoch}" in constraints.exclude:
        obstacles.append(Obstacle("excluded", "the query left it out by name"))
    weights = shares_for(loads, constraints, "engine")
    if weights and weights.get(member.engine, 0.0) <= 0:
        shares = " ".join(f"{engine}={weight:g}" for engine, weight in sorted(weights.items()))
        text = f"the engine weights ({shares}) give its engine {member.engine} no new request"
        obstacles.append(Obstacle("engine weights", text))
    split = shares_for(loads, constraints, "revision")
    if split.get(member.revision, 1.0) <= 0:
        shares = " ".join(f"{revision}={share:g}" for revision, share in sorted(split.items()))
        text = f"the traffic split ({shares}) gives its revision {member.revision} no new request"
        obstacles.append(Obstacle("traffic split", text))
    return Standing(
        True, member.epoch, member.engine, worker in state.cold, tuple(obstacles), member.revision
    )


def _role_text(worker: Traits, constraints: Constraints) -> str:
    if worker.role == "prefill":
        return "it only prefills, and this was a decode leg"
    return f"it cannot take over KV of the kind {constraints.pairs_with}: its own is {worker.pairs_with or 'none'}"


TEXTS: Final[dict[str, Callable[[Traits, Constraints], str]]] = {
    "capability": lambda worker, wanted: (
        f"its engine lacks {', '.join(one for one in wanted.needs if one not in worker.capabilities)}"
    ),
    "encode": lambda worker, wanted: "it only encodes media",
    "embeddings": lambda worker, wanted: (
        f"its embeddings are of the format {worker.pairs_with}, and {wanted.pairs_with} was needed"
    ),
    "lora": lambda worker, wanted: f"it does not hold adapter {wanted.lora_name} and loads none on demand",
    "tier": lambda worker, wanted: (
        f"it is of tier {worker.tier or '(none)'}, and the request was for tier {wanted.tier}"
    ),
    "engine": lambda worker, wanted: (
        f"it runs {worker.engine}, and the request was for engine {wanted.engine}"
    ),
    "revision": lambda worker, wanted: (
        f"it is of revision {worker.revision or '(none)'}, and the request was for revision {wanted.revision}"
    ),
    "taint": lambda worker, wanted: (
        f"the request did not tolerate {', '.join(sorted(set(worker.taints) - set(wanted.tolerates)))}"
    ),
    "tokenizer": lambda worker, wanted: "it has another tokenizer than the answer so far was generated with",
    "media processor": lambda worker, wanted: (
        "it processes media with other settings than the model card has"
    ),
    "role": _role_text,
    "state": lambda worker, _: f"it was {state_of(worker)}",
}
"""What each filter means for one worker."""


class Term(msgspec.Struct, frozen=True):
    """A part of the cost, of the worker and of the chosen one."""

    name: str
    worker: float
    chosen: float

    @property
    def more(self) -> float:
        """By how much the worker's is higher."""
        return self.worker - self.chosen


class Comparison(msgspec.Struct, frozen=True):
    """Two candidates of a decision. `unit` is that of costs; `terms` add up to both costs, and are empty where no times were known."""

    worker: Candidate
    chosen: Candidate
    unit: str
    terms: tuple[Term, ...]

    @property
    def lost_by(self) -> float:
        """By how much the worker's cost is higher; negative where it is lower."""
        return self.worker.score - self.chosen.score

    @property
    def decisive(self) -> tuple[str, ...]:
        """Terms of which each alone made the difference: as low as the chosen one's, it would have cost less."""
        return tuple(term.name for term in self.terms if 0 < self.lost_by < term.more)


def compare(decision: Decision, worker: Candidate) -> Comparison:
    """A candidate and the chosen one."""
    timed = any(candidate.prefill_ms for candidate in (worker, decision.chosen))
    terms: tuple[Term, ...] = ()
    if timed:
        worker_terms, chosen = cost_terms(worker, decision), cost_terms(decision.chosen, decision)
        terms = tuple(map(Term, CostTerms._fields, worker_terms, chosen))
    return Comparison(worker, decision.chosen, "ms" if timed else "blocks", terms)


def passed_over(decision: Decision, standing: Standing, worker: Candidate) -> str:
    """Why a candidate was not among those that were compared by cost, or not chosen though it cost no more; "" where cost decided."""
    draw, policy = decision.draw, decision.preferences.policy
    lower = worker.score <= decision.chosen.score
    if draw is not None and standing.engine != draw.used:
        weights = " ".join(f"{engine}={weight:g}" for engine, weight in draw.weights)
        return (
            f"the engine weights ({weights}) drew {draw.used} for this request, and it runs {standing.engine}"
        )
    split = decision.revision_draw
    if split is not None and standing.revision != split.used:
        shares = " ".join(f"{revision}={share:g}" for revision, share in split.weights)
        return f"the traffic split ({shares}) drew revision {split.used} for this request, and it is of {standing.revision or 'none'}"
    if policy not in ("", "kv"):
        return f"policy {policy} chose, which does not go by the cost alone"
    if decision.preferences.temperature > 0:
        return f"the choice was drawn at temperature {decision.preferences.temperature:g}, where a higher cost is less likely"
    if not lower:
        return ""
    if worker.leg != decision.chosen.leg:
        if decision.weights.apart and worker.leg == "":
            return "long prompts are prefilled apart (--weight apart), and it would have done all of it"
        return f"so little of the prompt was left to compute (at most {decision.weights.local_tokens} tokens) that it was not handed over"
    return "it cost the same: the request's seed drew among them"


def sentences(comparison: Comparison, decision: Decision) -> list[str]:
    """What a candidate would have cost, by how much more, and of which parts that is."""
    worker, chosen, unit = comparison.worker, comparison.chosen, comparison.unit
    by = comparison.lost_by
    more = (
        f"{by:.2f} {unit} more than" if by > 0 else f"{-by:.2f} {unit} less than" if by < 0 else "as much as"
    )
    lines = [
        f"it would have cost {worker.score:.2f} {unit}, {more} {chosen.worker} ({chosen.score:.2f} {unit})"
    ]
    parts = [
        f"{term.name} {term.worker:.2f} against {term.chosen:.2f} ({term.more:+.2f})"
        for term in comparison.terms
        if abs(term.more) > NEGLIGIBLE
    ]
    if parts:
        lines.append(f"in {unit}: {', '.join(parts)}")
    lines.append(
        f"it had {worker.cached_blocks} of the prompt's {decision.blocks} blocks cached, {chosen.worker} {chosen.cached_blocks}; "
        f"{worker.prefill_tokens} tokens queued against {chosen.prefill_tokens}; "
        f"{worker.requests} requests against {chosen.requests}; {worker.decode_blocks} blocks held against {chosen.decode_blocks}"
    )
    if comparison.decisive:
        names = " or ".join(comparison.decisive)
        lines.append(f"it would have cost less had its {names} been that of {chosen.worker}")
    return lines


NEAR = 1_000
"""Positions before a decision from which on it is folded again first: the decisions that its router had made and not stored are among them."""

BEFORE_NS = 3_600_000_000_000
"""How long before a decision the request log is searched for failures of the request."""


class Answer(NamedTuple):
    """Why one decision did not choose the worker. `chosen`: it did. `problem`: why its state is not known."""

    stored: StoredDecision
    chosen: bool
    standing: Standing | None
    obstacles: tuple[Obstacle, ...] = ()
    passed_over: str = ""
    comparison: Comparison | None = None
    problem: str = ""


Membership = list[tuple[int, str]]
"""When a worker joined and left, and as what, in order."""


def _absence(member: Membership, position: int) -> str:
    """What the log has about a worker that was not in the pool at a position."""
    before = [text for at, text in member if at <= position]
    after = [f"{text} at position {at}" for at, text in member if at > position]
    if before:
        return before[-1]
    return f"it {after[0]}, later" if after else "it never joined, as far as the log goes back"


class _Standings(Reconstruction):
    """A reconstruction that notes how the wanted decisions found a worker."""

    def __init__(self, state: RouterState, decisions: list[Recorded], request: str, worker: str) -> None:
        super().__init__(state, decisions, lambda decision: is_attempt_of(decision.request, request))
        self.standings: dict[Key, Standing] = {}
        self._worker = worker
        self._request = request

    def _compare(self, loads: Loads, recorded: Recorded) -> Difference | None:
        if is_attempt_of(recorded.decision.request, self._request):
            standing = standing_of(self.state, loads, self._worker, recorded.decision)
            self.standings[recorded.incarnation, recorded.decision.number] = standing
        return super()._compare(loads, recorded)


async def why_not(nats: NatsSettings, pool: str, request: str, worker: str, *, as_json: bool) -> int:
    """Print it for each decision about the request. 1 if there is none."""
    async with operator_ports(nats, "why-not") as ports:
        return await show(ports, await choose_pool(ports, pool), request, worker, as_json=as_json)


async def show(ports: Ports, pool: str, request: str, worker: str, *, as_json: bool = False) -> int:
    """See `why_not`. Raises `ConfigError`."""
    check_id(request)
    log = await open_log(ports, pool)
    members = await _memberships(ports.ns, pool, log)
    if worker not in members:
        names = ", ".join(sorted(members)) or "none"
        raise ConfigError(f"WORKER {worker}: no such worker ever joined pool {pool}; there were: {names}")
    stored = await _decisions(ports.ns, pool, log, request)
    if not stored:
        print(
            f"no decision for {request} in this log; {ID_FORM}",
            file=sys.stderr,
        )
        return 1
    answers = await answer(ports, pool, log, request, worker, stored)
    if as_json:
        print(msgspec.json.encode([as_data(answered, worker) for answered in answers]).decode())
    else:
        print("\n".join(as_text(answered, worker, members[worker]) for answered in answers))
    return 0


async def _decisions(ns: str, pool: str, log: PoolLog, request: str) -> list[StoredDecision]:
    decisions: list[StoredDecision] = []
    last = (await log.log.bounds()).last
    with Progress("searching the log for decisions") as progress:
        async for piece in log.log.scan(0, last, (pool_subject(ns, pool, "route", ANY),)):
            for record in piece.records:
                progress.at(record.position, last)
                decisions += [
                    one for one in decisions_in(record) if is_attempt_of(one.decision.request, request)
                ]
    return decisions


async def _memberships(ns: str, pool: str, log: PoolLog) -> dict[str, Membership]:
    memberships: dict[str, Membership] = {}
    first, last = await log.log.bounds()
    if first > 1:
        # The log does not have the joining of those that were there when it begins.
        begins = await nearest_state(log, await earliest(log))
        for name, worker in begins.loads.workers.items():
            text = f"was there as epoch {worker.epoch} when the log begins"
            memberships[name] = [(begins.position, text)]
    async for piece in log.log.scan(0, last, (pool_subject(ns, pool, "fleet", ANY),)):
        for record, event in piece.events():
            if isinstance(event, WorkerJoined):
                text = f"joined as epoch {event.epoch}"
            elif isinstance(event, WorkerLeft):
                text = f"epoch {event.epoch} had left at position {record.position}: {event.reason}"
            else:
                continue
            memberships.setdefault(event.worker, []).append((record.position, text))
    return memberships


async def answer(
    ports: Ports, pool: str, log: PoolLog, request: str, worker: str, stored: list[StoredDecision]
) -> list[Answer]:
    """The answer for each decision, on the state that it was made on."""
    near = await nearest_state(log, max(0, min(entry.decision.position for entry in stored) - NEAR))
    run = await _fold(log, near, request, worker, stored)
    if len(run.standings) < len(stored) and near.position > 0:
        # A router had made decisions before that state which were not stored yet.
        base_state = await nearest_state(log, await earliest(log))
        run = await _fold(log, base_state, request, worker, stored)
    failed = await _failures(ports, request, worker, stored)
    return [_answer(entry, worker, run, failed) for entry in stored]


async def _fold(
    log: PoolLog, state: RouterState, request: str, worker: str, stored: list[StoredDecision]
) -> _Standings:
    """Fold from a state until all decisions about the request are made again."""
    start, last = state.position, stored[-1].position
    run = _Standings(state, await decisions_after(log.log, start, last), request, worker)
    await make_again(run, log.log.scan(start, last), last)
    return run


async def _failures(ports: Ports, request: str, worker: str, stored: list[StoredDecision]) -> dict[int, str]:
    """Where the request had failed on that worker's incarnations, by epoch: the first reason."""
    start = await ports.requests.position_at(stored[0].stored_ns - BEFORE_NS)
    end = await ports.requests.position_at(stored[-1].stored_ns)
    failed: dict[int, str] = {}
    async for piece in ports.requests.scan(start, end):
        for _, event in piece.events():
            if isinstance(event, RequestStepped) and (event.request, event.worker) == (request, worker):
                failed.setdefault(event.epoch, event.reason or event.cause)
            elif isinstance(event, RequestRouted) and (event.request, event.worker) == (request, worker):
                failed.setdefault(event.epoch, "it was tried before")
    return failed


def _answer(stored: StoredDecision, worker: str, run: _Standings, failed: dict[int, str]) -> Answer:
    decision = stored.decision
    key = stored.router, decision.number
    standing = run.standings.get(key)
    if decision.worker == worker:
        return Answer(stored, True, standing)
    again = run.found.get(key)
    problem = "this log does not hold all that it was made on" if again is None else again.problem
    candidates = again.candidates if again is not None and not again.problem else decision.candidates
    candidate = next((one for one in candidates if one.worker == worker), None)
    if standing is None:
        comparison = compare(decision, candidate) if candidate is not None else None
        return Answer(stored, False, None, comparison=comparison, problem="" if candidate else problem)
    obstacles = tuple(_with_reason(one, standing, failed) for one in standing.obstacles)
    if candidate is None:
        if not obstacles and standing.present and not problem:
            obstacles = (_no_leg(decision),)
        return Answer(stored, False, standing, obstacles, problem="" if obstacles else problem)
    return Answer(
        stored,
        False,
        standing,
        obstacles,
        passed_over(decision, standing, candidate),
        compare(decision, candidate),
    )


def _with_reason(obstacle: Obstacle, standing: Standing, failed: dict[int, str]) -> Obstacle:
    """Of a worker that the query left out: whether it had failed the request, or was saturated."""
    if obstacle.name != "excluded":
        return obstacle
    if standing.epoch in failed:
        text = f"the request had failed there before ({failed[standing.epoch]})"
        return Obstacle("failed before", text)
    text = "it was saturated (limits of --busy), and another worker was not"
    return Obstacle("saturated", text)


def _no_leg(decision: Decision) -> Obstacle:
    """It passed all filters, and there was nothing of the request for it to do."""
    leg = decision.leg or "whole"
    return Obstacle(
        "leg", f"with its role there was nothing for it to do in this request (the chosen one does: {leg})"
    )


def as_data(answer: Answer, worker: str) -> dict[str, Any]:
    """An answer for programs."""
    decision, comparison = answer.stored.decision, answer.comparison
    return {
        "decision": decision.request,
        "made_at": decision.position,
        "stored_at": answer.stored.position,
        "worker": worker,
        "chosen": decision.worker,
        "was_chosen": answer.chosen,
        "present": None if answer.standing is None else answer.standing.present,
        "cold": None if answer.standing is None else answer.standing.cold,
        "obstacles": answer.obstacles,
        "passed_over": answer.passed_over,
        "problem": answer.problem,
        "cost": None
        if comparison is None
        else {
            **fields_of(comparison, "unit", "lost_by", "terms", "decisive"),
            "candidate": msgspec.structs.asdict(comparison.worker),
            "chosen": msgspec.structs.asdict(comparison.chosen),
        },
    }


def as_text(answer: Answer, worker: str, member: Membership) -> str:
    """An answer in a few sentences."""
    decision = answer.stored.decision
    head = f"{decision.request}: decided at log position {decision.position}, went to {decision.worker}"
    lines: list[str] = []
    if answer.chosen:
        return f"{head}, the worker asked about"
    if answer.standing is not None and not answer.standing.present:
        lines.append(f"{worker} was not in the pool: {_absence(member, decision.position)}")
    lines += [f"{worker} was no candidate: {obstacle.text}" for obstacle in answer.obstacles]
    if answer.comparison is not None:
        if answer.passed_over:
            lines.append(f"{worker} was a candidate and not chosen: {answer.passed_over}")
        lines += sentences(answer.comparison, decision)
    if answer.standing is not None and answer.standing.cold:
        lines.append("its cached blocks did not count: KV events of it were missing (cold)")
    if answer.problem:
        lines.append(f"whether {worker} could have been chosen cannot be recomputed: {answer.problem}")
    return "\n".join([head, *(f"  {line}" for line in lines)])
