"""Deciding where prefill and decode are apart: which part goes where, when neither does, and adapters and states."""

import msgspec
import pytest

from headwater.router.decide import recompute
from headwater.router.state import RouterState
from headwater.schemas.events import (
    LORA_ON_DEMAND,
    BlocksStored,
    LoadReported,
    Role,
    WorkerChanged,
    WorkerJoined,
    WorkerState,
)
from headwater.schemas.routing import Decision, RequestedLeg, RouteRefused, Weights
from tests.support.data.examples import packed
from tests.support.data.queries import route_query
from tests.support.data.story import fold, reply_on, tell

PROMPT = tuple(range(1, 65))
"""64 blocks of 16 tokens."""

PAIR = "vllm/1/m"


def fleet(**roles: Role) -> RouterState:
    """Workers by role, which can all hand over to each other."""
    state = fold([])
    for name, role in roles.items():
        add(state, name, role)
    return state


def add(
    state: RouterState,
    name: str,
    role: Role,
    pair: str = PAIR,
    *,
    capabilities: tuple[str, ...] = (),
    slots: int = 0,
) -> None:
    """One more worker."""
    joined = WorkerJoined(name, 1, "m", "vllm", role, 16, 1000, 256, pair, capabilities, slots, name)
    tell(state, joined, writer=name)


def change(
    state: RouterState, name: str, to: WorkerState = "ready", role: Role = "both", loras: tuple[str, ...] = ()
) -> None:
    """An operator, or the worker itself, changed how it stands."""
    tell(state, WorkerChanged(name, 1, to, role, loras), writer=name)


def ask(
    state: RouterState,
    tokens: int = 1025,
    *,
    asked: RequestedLeg = "",
    exclude: tuple[str, ...] = (),
    pinned: str = "",
    lora: str = "",
    needs: tuple[str, ...] = (),
    pair: str = PAIR,
    weights: Weights | None = None,
) -> Decision | RouteRefused:
    """Decide, and again from the record: both must be the same."""
    hashes = packed(*PROMPT[: tokens // 16])
    query = route_query(
        "r-0-1",
        tokens,
        10,
        hashes,
        pinned=pinned,
        exclude=exclude,
        leg=asked,
        lora_name=lora,
        needs=needs,
        pairs_with=pair if asked == "decode" else "",
    )
    decision = reply_on(state, query, weights=weights or Weights())
    if isinstance(decision, Decision):
        assert recompute(state.index, state.loads, state.cold, decision) == decision
    return decision


def chosen(decision: Decision | RouteRefused) -> tuple[str, str]:
    """Worker and leg."""
    assert isinstance(decision, Decision), decision
    return decision.worker, decision.leg


def test_a_long_prompt_goes_to_a_prefill_worker_and_on_from_there() -> None:
    """Two questions, two decisions: the prompt first, then whoever decodes behind it."""
    state = fleet(p="prefill", d="decode")
    busy(state, "d")
    first = ask(state)
    assert chosen(first) == ("p", "prefill")
    assert isinstance(first, Decision)
    assert first.pairs_with == PAIR
    assert [(one.worker, one.leg) for one in first.candidates] == [("d", ""), ("p", "prefill")]
    assert chosen(ask(state, asked="decode")) == ("d", "decode")


def busy(state: RouterState, name: str) -> None:
    """The worker decodes something: computing a prompt there would be in its way."""
    decision = ask(state, 17, exclude=tuple(f"{other}.1" for other in state.loads.workers if other != name))
    assert isinstance(decision, Decision)
    decision = msgspec.structs.replace(decision, request="x", assumed=b"")
    tell(state, decision, writer="router")
    report = LoadReported(1, 0, 2, 1000, ("x",), ("x",))
    tell(state, report, writer=name)


@pytest.mark.parametrize("cached", [0, 40, 60])
def test_what_is_short_or_mostly_cached_stays_where_it_is_decoded(cached: int) -> None:
    """At most `local_tokens` to compute: moving the rest would cost more than it saves."""
    state = fleet(p="prefill", d="decode")
    busy(state, "d")
    for name in ("p", "d") if cached else ():
        tell(state, BlocksStored(0, packed(*PROMPT[:cached])), writer=name)
    uncached = 1025 - cached * 16
    assert chosen(ask(state, weights=Weights(local_tokens=uncached))) == ("d", "")
    assert chosen(ask(state, weights=Weights(local_tokens=uncached - 1))) == ("p", "prefill")
    assert chosen(ask(state, 200)) == ("d", "")


def test_a_queue_at_the_prefill_workers_sends_prompts_to_the_decode_workers() -> None:
    """The estimate decides, not the role."""
    state = fleet(p="prefill", d="decode")
    assert chosen(ask(state)) == ("d", ""), "nobody decodes there, so computing the prompt disturbs nobody"
    busy(state, "d")
    assert chosen(ask(state)) == ("p", "prefill")
    for number in range(8):
        decision = ask(state, exclude=("d.1",), weights=Weights(local_tokens=0))
        assert isinstance(decision, Decision)
        # Of other prompts: nothing of this one is to be expected there.
        again = msgspec.structs.replace(decision, request=f"q{number}", assumed=b"")
        tell(state, again, writer="router")
    assert chosen(ask(state)) == ("d", "")


def test_prompts_can_be_kept_apart_whatever_it_costs() -> None:
    """For whoever wants decode workers that never compute a long prompt."""
    state = fleet(p="prefill", d="decode")
    assert chosen(ask(state)) == ("d", "")
    assert chosen(ask(state, weights=Weights(apart=True))) == ("p", "prefill")
    assert chosen(ask(state, 200, weights=Weights(apart=True))) == ("d", "")


def test_a_decode_leg_brings_no_prompt_to_compute() -> None:
    """The load of a worker that gets its KV from another one."""
    state = fleet(p="prefill", d="decode")
    decision = ask(state, asked="decode")
    assert isinstance(decision, Decision)
    tell(state, decision, writer="router")
    worker = state.loads.workers["d"]
    assert (worker.prefill_tokens, worker.decode_blocks) == (0, 65)


def test_nobody_to_decode_means_one_worker_does_both() -> None:
    """A fleet that lost its decode workers, or its prefill workers, still answers."""
    assert chosen(ask(fleet(p="prefill"))) == ("p", "")
    assert chosen(ask(fleet(d="decode"))) == ("d", "")
    state = fleet(p="prefill", d="decode")
    assert chosen(ask(state, exclude=("d.1",))) == ("p", "")
    assert isinstance(ask(state, asked="decode", exclude=("d.1",)), RouteRefused)


def test_only_pairs_hand_over() -> None:
    """Another version, another model: its KV would be read as something else."""
    state = fleet(p="prefill")
    add(state, "d", "decode", "vllm/2/m")
    busy(state, "d")
    assert chosen(ask(state)) == ("d", "")
    assert isinstance(ask(state, asked="decode"), RouteRefused)
    add(state, "e", "decode", "")
    assert isinstance(ask(state, asked="decode"), RouteRefused)
    add(state, "f", "both")
    assert chosen(ask(state, asked="decode")) == ("f", "decode")


def test_choices_of_one_prompt_stay_together_in_their_first_leg() -> None:
    """A pinned prefill worker is still only one half of the way."""
    state = fleet(p="prefill", q="prefill", d="decode")
    assert chosen(ask(state, pinned="q")) == ("q", "prefill")


@pytest.mark.parametrize("to", ["paused", "sleeping", "draining"])
def test_only_ready_workers_get_requests(to: WorkerState) -> None:
    """And it is ready again when it says so, in whatever role."""
    state = fleet(a="both", b="both")
    change(state, "a", to)
    assert {chosen(ask(state, tokens))[0] for tokens in range(17, 40)} == {"b"}
    change(state, "b", to)
    refused = ask(state)
    assert isinstance(refused, RouteRefused)
    assert refused.retry_after_s > 0
    change(state, "a", "ready", "prefill")
    assert chosen(ask(state)) == ("a", "")


def test_a_change_of_an_earlier_life_changes_nothing() -> None:
    """It speaks of a worker that is not there any more."""
    state = fleet(a="both")
    late = WorkerChanged("a", 0, "sleeping", "prefill", ())
    tell(state, late, writer="a")
    assert (state.loads.workers["a"].state, state.loads.workers["a"].role) == ("ready", "both")


def test_adapters_are_served_by_who_holds_them_or_may_load_them() -> None:
    """A holder is preferred; loading costs, and more where another adapter must go first."""
    state = fold([])
    add(state, "none", "both", capabilities=("generate",))
    refused = ask(state, lora="x")
    assert isinstance(refused, RouteRefused)
    assert "adapter x" in refused.reason
    add(state, "loads", "both", capabilities=("lora", LORA_ON_DEMAND), slots=1)
    decision = ask(state, lora="x")
    assert chosen(decision) == ("loads", "")
    assert isinstance(decision, Decision)
    assert decision.chosen.loads_lora
    free = decision.chosen.score
    change(state, "loads", loras=("y",))
    decision = ask(state, lora="x")
    assert isinstance(decision, Decision)
    assert decision.chosen.score == free + Weights().lora_load
    add(state, "holds", "both", capabilities=("lora",), slots=1)
    change(state, "holds", loras=("x",))
    decision = ask(state, lora="x")
    assert chosen(decision) == ("holds", "")
    assert isinstance(decision, Decision)
    assert not decision.chosen.loads_lora
    assert chosen(ask(state, lora="y"))[0] == "loads"


def test_what_a_request_needs_the_engine_must_have() -> None:
    """Said by name where nobody has it."""
    state = fold([])
    add(state, "a", "both", capabilities=("generate",))
    add(state, "b", "both", capabilities=("generate", "guide"))
    assert {chosen(ask(state, tokens, needs=("guide",)))[0] for tokens in range(17, 40)} == {"b"}
    refused = ask(state, needs=("embed",))
    assert isinstance(refused, RouteRefused)
    assert "embed" in refused.reason


SPLIT = ("generate", "handoff", "split_only")


def test_an_engine_that_serves_legs_only_is_never_given_a_whole_request() -> None:
    """Not even a short prompt is prefilled where it is decoded; and a worker that a client names prefills."""
    state = fold([])
    for name, role in (("p", "prefill"), ("d", "decode")):
        add(state, name, role, capabilities=SPLIT)  # type: ignore[arg-type]
    for tokens in (17, 1025):
        assert chosen(ask(state, tokens)) == ("p", "prefill")
    assert chosen(ask(state, pinned="p")) == ("p", "prefill")
    assert chosen(ask(state, asked="decode")) == ("d", "decode")
    refused = ask(state, pinned="d")
    assert isinstance(refused, RouteRefused)
    assert "worker d only decodes" in refused.reason
    add(state, "whole", "both")
    assert chosen(ask(state, 17)) == ("whole", "")


@pytest.mark.parametrize(("present", "missing"), [("prefill", "decode"), ("decode", "prefill")])
def test_half_a_pair_that_serves_legs_only_serves_nothing(present: Role, missing: Role) -> None:
    """And the refusal says which half is missing."""
    state = fold([])
    add(state, "w", present, capabilities=SPLIT)
    refused = ask(state)
    assert isinstance(refused, RouteRefused)
    assert f"it needs a {missing} worker" in refused.reason
    add(state, "other", missing, "another/model", capabilities=SPLIT)
    refused = ask(state)
    assert isinstance(refused, RouteRefused)
    assert "that can exchange KV" in refused.reason
