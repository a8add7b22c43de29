"""Policies and filters: whom each picks, and what it says where there is nobody."""

from collections import Counter

import pytest

from headwater.router.decide import recompute
from headwater.router.policies import POLICIES
from headwater.router.state import RouterState
from headwater.schemas.events import BlocksStored, WorkerChanged, WorkerJoined
from headwater.schemas.routing import CLIENT_POLICIES, Decision, RouteQuery, RouteRefused
from tests.support.data.examples import packed, record
from tests.support.data.queries import changed
from tests.support.data.story import fleet_of, reply_on, tell

PROMPT = packed(*range(1, 11))
NAMES = ("w1", "w2", "w3", "w4", "w5")


def fleet(*names: str, tier: str = "", taints: tuple[str, ...] = (), blocks: int = 1_000) -> RouterState:
    """Workers in their first life."""
    return fleet_of(
        *(
            WorkerJoined(name, 1, "m", "sim", "both", 16, blocks, 256, tier=tier, taints=taints)
            for name in names
        )
    )


def ask(state: RouterState, request: str, policy: str = "", number: int = 1, **fields: object) -> Decision:
    """What a router with this policy decides."""
    answer = reply(state, request, policy, number, **fields)
    assert isinstance(answer, Decision), answer
    assert recompute(state.index, state.loads, state.cold, answer) == answer
    return answer


def reply(
    state: RouterState, request: str, policy: str = "", number: int = 1, **fields: object
) -> Decision | RouteRefused:
    """The same, or why not."""
    query = changed(RouteQuery(request, 161, 5, PROMPT), policy=policy, **fields)
    return reply_on(state, query, number=number)


def loaded(state: RouterState, worker: str, requests: int) -> RouterState:
    """Give a worker so many requests."""
    for number in range(requests):
        hashes = packed(int(worker[1:]) << 32 | number + 1)
        state.loads.decide(ask(state, f"load-{worker}-{number}", pinned=worker, hashes=hashes))
    return state


def shares(state: RouterState, policy: str, count: int = 1_000, **fields: object) -> Counter[str]:
    """How often each worker is chosen for requests with different names."""
    return Counter(ask(state, f"r{n}-0-1", policy, n + 1, **fields).worker for n in range(count))


def test_round_robin_goes_round() -> None:
    """By the router's own count, whatever the workers hold."""
    state = loaded(fleet(*NAMES), "w3", 5)
    chosen = [ask(state, f"r{number}", "round_robin", number).worker for number in range(10)]
    assert sorted(chosen[:5]) == list(NAMES)
    assert chosen[:5] == chosen[5:]


def test_random_spreads_alike_and_is_the_same_for_the_same_request() -> None:
    """Chance is the request's own."""
    state = fleet(*NAMES)
    assert all(150 < count < 250 for count in shares(state, "random").values())
    assert len({ask(state, "r-0-1", "random", number).worker for number in range(20)}) == 1


def test_power_of_two_never_takes_the_most_loaded_of_all() -> None:
    """One of the two that are drawn has less to do."""
    state = loaded(loaded(fleet(*NAMES), "w2", 9), "w4", 3)
    found = shares(state, "power_of_two")
    assert found["w2"] == 0
    assert 0 < found["w4"] < 150
    assert all(found[name] > 200 for name in ("w1", "w3", "w5"))
    assert ask(fleet("w1"), "r", "power_of_two").worker == "w1"


def test_least_loaded_goes_by_what_a_worker_can_hold() -> None:
    """Three requests weigh less on a worker ten times as large than one on a small one."""
    state = fleet("w1", blocks=100)
    state.apply(record(2, WorkerJoined("w2", 1, "m", "sim", "both", 16, 1_000, 256), writer="w2"))
    loaded(loaded(state, "w1", 1), "w2", 3)
    assert set(shares(state, "least_loaded", 20)) == {"w2"}


def test_sessions_stay_and_only_those_of_a_lost_worker_move() -> None:
    """Rendezvous hashing: nothing else changes its place."""
    sessions = [f"s{number}" for number in range(300)]
    state = fleet(*NAMES)
    before = {key: ask(state, f"r-{key}", "session", session=key).worker for key in sessions}
    assert {ask(state, f"x-{key}", "session", 9, session=key).worker for key in sessions[:1]} == {
        before[sessions[0]]
    }
    assert all(30 < count < 90 for count in Counter(before.values()).values())
    fewer = fleet(*NAMES[:-1])
    after = {key: ask(fewer, f"r-{key}", "session", session=key).worker for key in sessions}
    assert all(after[key] == worker for key, worker in before.items() if worker != "w5")


def test_a_session_yields_while_its_worker_has_far_more_to_do_than_the_others() -> None:
    """To the next in its own order, always the same one."""
    state = fleet(*NAMES)
    home = ask(state, "r", "session", session="s").worker
    loaded(state, home, 12)
    away = {ask(state, f"r{number}", "session", session="s").worker for number in range(10)}
    assert len(away) == 1
    assert home not in away


def test_without_a_session_the_least_cost_decides() -> None:
    """As under kv."""
    state = fleet(*NAMES)
    state.apply(record(9, BlocksStored(0, PROMPT), writer="w4"))
    assert set(shares(state, "session", 20)) == {"w4"} == set(shares(state, "kv", 20))


def test_a_temperature_makes_dear_workers_less_likely_and_not_impossible() -> None:
    """Cold: the best. Warm: mostly the best. Hot: nearly anyone."""
    state = fleet(*NAMES)
    state.apply(record(9, BlocksStored(0, PROMPT[:40]), writer="w4"))
    assert set(shares(state, "kv", 200, temperature=0.0)) == {"w4"}
    warm, hot = (shares(state, "kv", 1_000, temperature=t)["w4"] for t in (0.3, 30.0))
    assert 300 < warm < 1_000
    assert 150 < hot < 260


def test_direct_goes_where_it_is_told_or_nowhere() -> None:
    """A request without a worker is refused for good, not sent anywhere."""
    state = fleet(*NAMES)
    assert ask(state, "r", "direct", pinned="w3").worker == "w3"
    refused = reply(state, "r", "direct")
    assert isinstance(refused, RouteRefused)
    assert (refused.status, refused.reason) == (400, "policy direct: the request names no worker")


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    """Nobody's request is silently routed otherwise."""
    refused = reply(fleet("w1"), "r", "fastest")
    assert isinstance(refused, RouteRefused)
    assert refused.status == 400
    assert all(name in refused.reason for name in ("fastest", *POLICIES))
    assert set(CLIENT_POLICIES) <= set(POLICIES)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "direct"])
def test_no_policy_gets_round_the_filters(policy: str) -> None:
    """Excluded, paused, tainted and other tiers' workers are no candidates."""
    state = fleet("w1", tier="gold")
    for at, name in enumerate(NAMES[1:]):
        joined = WorkerJoined(name, 1, "m", "sim", "both", 16, 1_000, 256, tier="gold" if at < 3 else "lead")
        tell(state, joined, writer=name)
    paused = WorkerChanged("w2", 1, "paused", "both")
    tainted = WorkerChanged("w3", 1, "ready", "both", taints=("spot",))
    tell(state, paused, writer="w2")
    tell(state, tainted, writer="w3")
    wanted = {"tier": "gold", "exclude": ("w4.1",)}
    assert set(shares(state, policy, 60, **wanted)) == {"w1"}
    assert set(shares(state, policy, 200, **wanted, tolerates=("spot", "other"))) <= {"w1", "w3"}


def test_the_reason_names_the_filter_that_left_nobody() -> None:
    """What can not change soon comes first."""
    state = fleet("w1", "w2", taints=("spot",))

    def reason(**fields: object) -> str:
        refused = reply(state, "r", **fields)  # type: ignore[arg-type]
        assert isinstance(refused, RouteRefused)
        return refused.reason

    assert reason(tier="gold") == "none of the 2 workers is of tier gold"
    assert "taints" in reason()
    assert "just failed" in reason(tolerates=("spot",), exclude=("w1.1", "w2.1"))
    assert "has LoRA adapter x or can load it" in reason(lora_name="x")
    assert reason(pinned="w9") == "worker w9 is not in this pool"
