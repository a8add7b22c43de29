"""Scoring all workers as arrays gives what scoring them one by one gives, bit for bit, however the arrays were kept up to date."""

import random
from typing import Final

import msgspec
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater.router.admission import is_saturated, saturated_workers
from headwater.router.candidates import Candidates, score_candidates, select_legs
from headwater.router.context import DecisionContext, ScoringContext
from headwater.router.decide import decide, prompt_of, seed_of
from headwater.router.policies import POLICIES, Choice
from headwater.router.queue import BusyLimits
from headwater.router.state import RouterState
from headwater.schemas.events import (
    LORA_ON_DEMAND,
    BlocksStored,
    EnginesWeighted,
    Event,
    KvGap,
    LoadReported,
    RequestsHeld,
    Role,
    TrafficSplit,
    WorkerChanged,
    WorkerDraining,
    WorkerLeft,
    WorkerState,
)
from headwater.schemas.hashing import chain_plain, pack_hashes
from headwater.schemas.routing import Constraints, Decision, DecisionVoided, Preferences, RouteQuery, Weights
from tests.support.data import plain_candidates as plain
from tests.support.data.examples import joined, record

NAMES: Final = [f"w{number}" for number in range(7)]
MANY: Final = [f"w{number}" for number in range(24)]
"""Enough workers for their spare capacity to count."""

PROMPTS: Final = [
    np.array(chain_plain([1] * (number % 4) + [number] * (number + 1), 1, 0), np.uint64)
    for number in range(8)
]


class RandomFleet:
    """Workers of every kind, that are told anything in any order; times jump across every limit."""

    def __init__(self, draw: random.Random, names: list[str]) -> None:
        self.draw = draw
        self.names = names
        self.state = RouterState()
        self.now_ns = 1_800_000_000_000_000_000
        self.epochs = dict.fromkeys(names, 0)
        self.requests: list[tuple[str, str]] = []
        self.alike = draw.random() < 0.3
        self.split = draw.random() < 0.5
        self.age_ns = draw.choice((0, 0, 12_000_000, 250_000_000, 3_000_000_000))
        for name in names[: draw.randrange(1, len(names) + 1)]:
            self.join(name)

    def tell(self, writer: str, epoch: int, event: Event) -> None:
        """Fold one event."""
        told = record(
            self.state.position + 1,
            event,
            writer=writer,
            epoch=epoch,
            wall_ns=self.now_ns,
            age_ns=self.age_ns,
        )
        self.state.apply(told)

    def join(self, name: str) -> None:
        """A worker (re)starts."""
        draw = self.draw
        self.epochs[name] += 1
        fields = (
            {}
            if self.alike
            else {
                "role": draw.choice(("both", "prefill", "decode")) if self.split else "both",
                "pairs_with": draw.choice(("", "nixl", "nixl", "file")),
                "revision": draw.choice(("", "r1", "r1", "r2")),
                "capabilities": draw.choice(
                    (
                        (),
                        ("kv_events", "guided"),
                        (LORA_ON_DEMAND,),
                        ("split_only",),
                        ("kv_events",),
                        ("kv_events",),
                        (*("kv_events",), LORA_ON_DEMAND),
                    )
                ),
                "lora_slots": draw.choice((0, 1, 2)),
                "tier": draw.choice(("", "", "gold")),
                "taints": draw.choice(((), (), ("spot",), ("spot", "old"))),
                "engine": draw.choice(("sim", "vllm")),
                "total_blocks": draw.choice((7, 1_000, 40_000)),
                "tokenizer": draw.choice(("", "t", "u")),
                "block_size": draw.choice((16, 16, 64)),
            }
        )
        self.tell(name, self.epochs[name], msgspec.structs.replace(joined(name, self.epochs[name]), **fields))
        if not self.alike and draw.random() < 0.5:
            role, loras = self.state.loads.workers[name].role, draw.choice(((), ("a",), ("a", "b")))
            self.tell(name, self.epochs[name], WorkerChanged(name, self.epochs[name], "ready", role, loras))

    def happen(self) -> None:
        """Something happens to some worker."""
        draw = self.draw
        self.now_ns += draw.choice((0, 1_000_000, 400_000_000, 27_000_000_000, 31_000_000_000))
        name = draw.choice(self.names)
        epoch = self.epochs[name]
        mine = [request for worker, request in self.requests if worker == name]
        some = tuple(request for request in mine if draw.random() < 0.5)
        match draw.randrange(11):
            case 0:
                self.join(name)
            case 1:
                self.tell("r", 1, WorkerLeft(name, epoch, "gone"))
            case 2:
                self.tell(name, epoch, WorkerDraining(name, epoch))
            case 3:
                role: Role = draw.choice(("both", "prefill", "decode")) if self.split else "both"
                state: WorkerState = draw.choice(("ready", "ready", "paused"))
                loras, taints = draw.choice(((), ("a",), ("a", "b"))), draw.choice(((), ("spot",)))
                self.tell(name, epoch, WorkerChanged(name, epoch, state, role, loras, taints))
            case 4:
                self.tell(name, epoch, RequestsHeld(draw.choice((some, ()))))
            case 5 if mine:
                self.tell("r", 1, DecisionVoided(mine[0], name, epoch))
            case 6 if draw.random() < 0.2:
                present = self.state.loads.splits.get("revision")
                split = draw.choice(({}, {"r1": 1.0, "r2": 1.0}, {"r1": 3.0, "r2": 0.0}))
                self.tell(
                    "r", 1, TrafficSplit("revision", split, present.position if present is not None else 0)
                )
            case 6 if draw.random() < 0.3:
                weights = draw.choice(({}, {}, {"sim": 0.5, "vllm": 0.5}, {"vllm": 1.0}))
                self.tell("r", 1, EnginesWeighted(weights))
            case 6:
                self.tell(name, epoch, KvGap(1))
            case 7 | 8:
                names = draw.choice(PROMPTS)
                stored = names[: draw.randrange(1, len(names) + 1)]
                self.tell(name, epoch, BlocksStored(0, pack_hashes(stored), draw.choice((0, 0, 1, 2))))
            case _:
                self.teach(name, some)

    def teach(self, name: str, requests: tuple[str, ...]) -> None:
        """A load report, mostly with enough samples to know its step times."""
        draw = self.draw
        lengths = [1 << draw.randrange(13) for _ in range(draw.choice((0, 3, 20)))]
        report = LoadReported(
            draw.randrange(9),
            draw.randrange(9),
            draw.randrange(900),
            draw.choice((7, 1_000)),
            requests[0::3],
            requests[1::3],
            requests[2::3],
            prefills=tuple((tokens, tokens * draw.randrange(40, 60)) for tokens in lengths),
            step_us=draw.choice((0, 9_000, 24_000, 60_000)),
            gaps=draw.choice((0, 1, 90, 7_000)),
            outputs=tuple((draw.randrange(500), draw.randrange(500)) for _ in range(2)),
            answered=tuple((draw.randrange(500), 0) for _ in range(2)),
        )
        self.tell(name, self.epochs[name], report)

    def query(self, number: int) -> RouteQuery:
        """A request with any constraints."""
        draw = self.draw
        names = draw.choice(PROMPTS)
        excluded = tuple(f"{name}.{self.epochs[name]}" for name in self.names if draw.random() < 0.1)
        constraints = Constraints(
            pinned=draw.choice(self.names) if draw.random() < 0.1 else "",
            exclude=excluded,
            leg="decode" if self.split and draw.random() < 0.2 else "",
            lora_name=draw.choice(("", "", "a", "c")),
            needs=draw.choice(((), (), ("guided",))),
            pairs_with=draw.choice(("", "nixl")),
            tier=draw.choice(("", "", "", "gold")),
            engine=draw.choice(("", "", "", "vllm")),
            tokenizer=draw.choice(("", "", "t")),
            tolerates=draw.choice(((), ("spot",), ("spot", "old"))),
        )
        preferences = Preferences(
            draw.choice(("kv", "kv", "least_loaded", "slo", "slo", "lmetric")),
            draw.choice((0.0, 0.0, 0.5)),
            "session",
        )
        tokens = len(names) * 16 + draw.choice((0, 1, 15, 2_000))
        return RouteQuery(f"q{number}", tokens, 9, pack_hashes(names), constraints, preferences)

    def weights(self) -> Weights:
        """Any weights."""
        draw = self.draw
        return Weights(
            prefill=draw.choice((0.0, 1.0, 64.0)),
            decode=draw.choice((0.0, 0.3, 1.0)),
            lower_tier=draw.choice((0.0, 0.3)),
            transfer=draw.choice((0.0, 0.1)),
            interference=draw.choice((0.0, 1.0)),
            local_tokens=draw.choice((0, 256, 10_000)),
            lora_load=draw.choice((0.0, 64.0)),
            apart=draw.random() < 0.3,
            estimate=draw.random() < 0.8,
            crowding=draw.choice((0.0, 0.25)),
            arrivals=draw.choice((0.0, 5.0)),
            memory=draw.choice((0.0, 100.0)),
            queued=draw.choice((0.0, 0.5)),
            crowding_spare=draw.choice((0.0, 9.0)),
            ttft_limit_ms=draw.choice((0.0, 40.0, 500.0)),
            itl_limit_ms=draw.choice((0.0, 25.0, 40.0)),
        )


def chosen_plainly(scoring: ScoringContext, request: str) -> tuple[list[object], object]:
    """(all candidates, the chosen one), worker by worker."""
    candidates = plain.score_candidates(scoring)
    if not candidates:
        return [], None
    offered, seed = plain.select_legs(scoring, candidates), seed_of(request)
    match scoring.preferences.policy:
        case "least_loaded":
            choice = plain.pick_least_loaded(scoring.loads, offered, seed)
        case "slo":
            choice = plain.pick_within_limits(scoring, offered, seed)
        case "lmetric":
            choice = plain.pick_lowest_product(scoring, offered, seed)
        case _:
            choice = plain.pick_lowest_cost(offered, scoring.preferences.temperature, seed)
    return list(candidates), choice


@settings(max_examples=60)
@given(st.integers(0, 2**32))
@example(45697874)  # the decisions of one worker are swapped by 40 s, as the clocks of two routers are
def test_every_decision_equals_the_plain_one(seed: int) -> None:
    """The same candidates, the same costs to the last bit, and the same choice, after every event."""
    compare_decisions(seed, NAMES)


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_every_decision_of_a_larger_fleet_equals_the_plain_one(seed: int) -> None:
    """There, spare capacity counts."""
    compare_decisions(seed, MANY)


def compare_decisions(seed: int, names: list[str]) -> None:
    """Tell a fleet of these workers anything, and compare decisions in between."""
    draw = random.Random(seed)
    fleet = RandomFleet(draw, names)
    for number in range(12):
        for _ in range(draw.randrange(6)):
            fleet.happen()
        if draw.random() < 0.3:
            for name in names:
                fleet.teach(name, ())
        query, weights, state = fleet.query(number), fleet.weights(), fleet.state
        # The clocks of two routers may differ.
        now_ns = fleet.now_ns - draw.choice((0, 0, 0, 40_000_000_000))
        context = DecisionContext(number, state.position, 0, now_ns, weights, False)
        limits = BusyLimits(draw.choice((0, 10, 2_000)), draw.choice((0.0, 0.1, 0.9)), draw.choice((0, 4)))
        busy = [one for one in state.loads.workers.values() if is_saturated(one, now_ns, limits)]
        assert saturated_workers(state.loads, now_ns, limits) == tuple(
            sorted(f"{one.name}.{one.epoch}" for one in busy)
        )
        prompt = prompt_of(query)
        _, depths = state.index.find(prompt.hashes)
        credited = {name: draw.randrange(9) for name in names if draw.random() < 0.3}
        scoring = ScoringContext(
            state.index, depths, state.cold, query, context, state.loads, credited, query.preferences
        )
        found = score_candidates(scoring)
        expected, choice = chosen_plainly(scoring, query.request)
        assert encoded(found) == encoded(expected)
        assert found.spare == plain.spare_capacity(scoring, plain.allowed_workers(scoring))
        if expected:
            offered = select_legs(scoring, found)
            picked = POLICIES[query.preferences.policy](Choice(scoring, offered, seed_of(query.request)))
            assert picked == choice
        made = decide(state.index, state.loads, state.cold, prompt, query, context)
        if isinstance(made, Decision):
            fleet.requests.append((made.worker, made.request))
            fleet.tell("r", 1, made)
            if draw.random() < 0.5:
                accepted = LoadReported(1, 0, 9, 1_000, accepted=(made.request,))
                fleet.tell(made.worker, made.epoch, accepted)


def encoded(candidates: Candidates | list[object]) -> bytes:
    """Their bytes: equal only if every number is, to the last bit."""
    return msgspec.msgpack.encode(list(candidates))


def test_numbers_too_large_for_the_arrays_do_not_stop_decisions() -> None:
    """A worker that reports nonsense is one that nobody chooses."""
    state = RouterState()
    for position, name in enumerate(("w1", "w2"), 1):
        state.apply(record(position, joined(name), writer=name))
    nonsense = LoadReported(0, 0, 2**64 - 1, 2**64 - 1)
    state.apply(record(3, nonsense, writer="w1"))
    context = DecisionContext(1, 3, 0, 0, Weights(), False)
    query = RouteQuery("q", 100, 1, b"")
    assert isinstance(
        decide(state.index, state.loads, state.cold, prompt_of(query), query, context), Decision
    )
