"""Hand-offs: given once, to the right prompt, in time; and whatever nobody fetches goes back to the engine."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater.actors.worker.handoffs import REMEMBERED_MAX, Handoffs, UnclaimedKv
from headwater.engines.engine import Pinned
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import (
    GenerateRequest,
    Handoff,
    HandoffClaim,
    HandoffDenied,
    HandoffGranted,
    Sampling,
    prompt_digest,
)
from tests.support.worlds.clock import ManualClock

PINNED = Pinned(b"where the KV is", 30.0)


def request(number: int, *, lora: str = "", salt: str = "") -> GenerateRequest:
    """A prefill leg of a prompt of its own."""
    return GenerateRequest(
        f"r{number}", "e1", number, pack_tokens([number] * 8), Sampling(4), lora_name=lora, cache_salt=salt
    )


def claim_of(handoff: Handoff, prompt: bytes | None = None) -> HandoffClaim:
    """What a decode worker asks."""
    return HandoffClaim(handoff.id, handoff.prompt if prompt is None else prompt, "w2", 9)


def ledger() -> tuple[ManualClock, Handoffs]:
    """In its first life."""
    clock = ManualClock()
    handoffs = Handoffs("w1", clock, "returned")
    handoffs.begin_incarnation(4)
    return clock, handoffs


def test_the_parameters_are_given_once() -> None:
    """A hand-off that is claimed again, by whomever, is refused: that is how a prompt gets another one's answer."""
    _, handoffs = ledger()
    made = handoffs.offer(request(1), PINNED, "h1")
    assert (made.worker, made.epoch, made.prompt_tokens, made.expires_ms) == ("w1", 4, 8, 30_000)
    assert handoffs.claim(claim_of(made)) == HandoffGranted(PINNED.params)
    for _ in range(3):
        assert handoffs.claim(claim_of(made)) == HandoffDenied("consumed")
    assert handoffs.release("r1") == [], "its KV is the other engine's affair"
    assert handoffs.claim(claim_of(made)) == HandoffDenied("consumed")


def test_an_engine_that_does_not_notice_a_fetch_is_told() -> None:
    """Simulated engines of processes apart: else the prompt would hold its blocks until its lease ends."""
    handoffs = Handoffs("w1", ManualClock(), "returned", notices_fetches=False)
    made = handoffs.offer(request(1), PINNED, "h1")
    assert handoffs.claim(claim_of(made)) == HandoffGranted(PINNED.params)
    assert handoffs.release("r1") == [UnclaimedKv("r1", PINNED.params)]
    assert handoffs.claim(claim_of(made)) == HandoffDenied("consumed")


def test_what_nobody_claimed_for_an_edge_is_released_with_it() -> None:
    """Of that incarnation of the edge, and nothing that another worker is fetching."""
    _, handoffs = ledger()
    of_edge = [
        msgspec.structs.replace(request(number), edge_epoch=epoch)
        for number, epoch in enumerate((5, 5, 6, 0))
    ]
    claimed, _, _, _ = (handoffs.offer(one, PINNED, one.request) for one in of_edge)
    assert handoffs.edges() == [("e1", 5), ("e1", 6)]
    assert isinstance(handoffs.claim(claim_of(claimed)), HandoffGranted)
    assert handoffs.release_edge(("e1", 5)) == [UnclaimedKv("r1", PINNED.params)]
    assert handoffs.edges() == [("e1", 6)]
    assert len(handoffs) == 3


def test_it_is_good_for_its_own_prompt_only() -> None:
    """Other tokens, another adapter, another salt: denied, and still there for the right one."""
    _, handoffs = ledger()
    made = handoffs.offer(request(1), PINNED, "h1")
    tokens = request(1).tokens
    others = [
        prompt_digest("", "", tokens[:-4]),
        prompt_digest("adapter", "", tokens),
        prompt_digest("", "tenant", tokens),
        b"",
    ]
    for other in others:
        assert handoffs.claim(claim_of(made, other)) == HandoffDenied("other prompt")
    assert handoffs.claim(claim_of(made)) == HandoffGranted(PINNED.params)


def test_a_digest_does_not_confuse_adapter_and_salt() -> None:
    """The same letters in another place are another prompt."""
    assert prompt_digest("ab", "c", b"") != prompt_digest("a", "bc", b"")


def test_what_is_too_old_is_given_back_to_the_engine() -> None:
    """Nobody came: the KV is freed, and a claim that comes later is told so."""
    clock, handoffs = ledger()
    made = handoffs.offer(request(1), PINNED, "h1")
    clock.now_s += 30.0
    assert handoffs.claim(claim_of(made)) == HandoffDenied("expired")
    assert handoffs.expire() == [UnclaimedKv("r1", PINNED.params)]
    assert (len(handoffs), handoffs.expire()) == (0, [])
    assert handoffs.claim(claim_of(made)) == HandoffDenied("expired")


def test_a_cancelled_one_is_given_back_and_a_new_life_knows_none() -> None:
    """The client left; or the worker lost its lease, and whatever it promised is void."""
    _, handoffs = ledger()
    first, second, third = (handoffs.offer(request(n), PINNED, f"h{n}") for n in (1, 2, 3))
    assert handoffs.release("r1") == [UnclaimedKv("r1", PINNED.params)]
    assert handoffs.release("r1") == []
    assert handoffs.claim(claim_of(first)) == HandoffDenied("released")
    assert isinstance(handoffs.claim(claim_of(second)), HandoffGranted)
    assert handoffs.begin_incarnation(5) == [UnclaimedKv("r3", PINNED.params)]
    assert handoffs.claim(claim_of(third)) == HandoffDenied("unknown")


class Life(RuleBasedStateMachine):
    """Any order of offers, claims, ends and time: each KV is fetched at most once or freed once, never both."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.handoffs = ledger()
        self.made: dict[int, Handoff] = {}
        self.granted: set[int] = set()
        self.freed: list[str] = []

    @rule()
    def offer(self) -> None:
        number = len(self.made)
        self.made[number] = self.handoffs.offer(request(number), PINNED, f"h{number}")

    @rule(number=st.integers(0, 8), right=st.booleans())
    def claim(self, number: int, right: bool) -> None:
        if number in self.made:
            reply = self.handoffs.claim(claim_of(self.made[number], None if right else b"x"))
            if isinstance(reply, HandoffGranted):
                assert right
                assert number not in self.granted
                assert f"r{number}" not in self.freed
                self.granted.add(number)

    @rule(number=st.integers(0, 8))
    def end(self, number: int) -> None:
        self.freed += [one.request for one in self.handoffs.release(f"r{number}")]

    @rule(seconds=st.sampled_from([1.0, 29.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.freed += [one.request for one in self.handoffs.expire()]

    @rule()
    def new_life(self) -> None:
        self.freed += [one.request for one in self.handoffs.begin_incarnation(5)]

    @invariant()
    def nothing_is_freed_twice_or_while_it_is_fetched(self) -> None:
        assert len(self.freed) == len(set(self.freed))
        assert not {f"r{number}" for number in self.granted} & set(self.freed)

    def teardown(self) -> None:
        self.clock.now_s += 31.0
        self.freed += [one.request for one in self.handoffs.expire()]
        assert len(self.handoffs) == 0
        assert len(self.granted) + len(self.freed) == len(self.made), "something is pinned for ever"


Life.TestCase.settings = settings(stateful_step_count=30)
TestLife = Life.TestCase


def test_memory_of_spent_ones_is_bounded() -> None:
    """The oldest is forgotten, and is then unknown: never given."""
    _, handoffs = ledger()
    made = [handoffs.offer(request(number), PINNED, f"h{number}") for number in range(REMEMBERED_MAX + 1)]
    for number in range(len(made)):
        handoffs.release(f"r{number}")
    assert handoffs.claim(claim_of(made[0])) == HandoffDenied("unknown")
    assert handoffs.claim(claim_of(made[1])) == HandoffDenied("released")
