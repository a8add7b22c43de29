"""Evidence: which side an attempt counts for, and as what."""

import msgspec
import pytest

from headwater.ops.operator import rollout_gates as module
from headwater.ops.operator.rollout_gates import Evidence, Side
from headwater.schemas.events import RequestEnded, RequestRouted, RequestStarted, RequestStepped, SagaState
from headwater.schemas.routing import Constraints, Decision, Draw
from tests.unit.ops.operator.test_explain import DECISION


def decided(attempt: str, revision: str, **fields: object) -> Decision:
    """A decision for an attempt, made under the split at position 10."""
    return msgspec.structs.replace(DECISION, request=attempt, revision=revision, **{"position": 10, **fields})


def routed(request: str, number: int = 1, choice: int = 0) -> RequestRouted:
    """An attempt of a choice."""
    return RequestRouted(request, choice, f"{request}-{choice}-{number}", "w", 1, 0)


def ended(
    request: str, reason: str = "stop", tokens: int = 11, error: str = "", migrations: int = 0
) -> RequestEnded:
    """The end of a request that took 100 ms to its first token, and 1,100 ms."""
    return RequestEnded(request, reason, tokens, 0, migrations, 100.0, 1_100.0, error)


def stepped(request: str, cause: str) -> RequestStepped:
    """A failure of the first choice."""
    before: SagaState = "decode"
    return RequestStepped(request, 0, before, cause, "routing", "w", 1, f"worker w: {cause}")


def fold(found: Evidence, *events: object) -> dict[str, Side]:
    """The sides after these."""
    for event in events:
        if isinstance(event, Decision):
            found.decision(event)
        else:
            found.request(event)
    found.settle()
    return found.sides


def test_a_request_counts_for_the_revision_of_its_decision() -> None:
    """Once it has ended and its decision is known, in whichever order the logs are read."""
    found = Evidence("revision", 10)
    assert fold(found, routed("a"), RequestStarted("a", 0, "w", 1, 0, 80.0), ended("a")) == {}
    sides = fold(found, decided("a-0-1", "new"))
    assert (sides["new"].attempts, sides["new"].failures) == (1, 0)
    assert list(sides["new"].ttft_ms) == [80.0]
    assert list(sides["new"].itl_ms) == [100.0]
    assert found.side("unseen") == Side()


def test_a_failure_counts_where_it_happened() -> None:
    """The client saw none: another revision finished the answer."""
    sides = fold(
        Evidence("revision", 10),
        decided("a-0-1", "new"),
        decided("a-0-2", "old"),
        *(routed("a"), stepped("a", "lost"), routed("a", 2), ended("a", migrations=1)),
    )
    assert {name: (one.attempts, one.failures) for name, one in sides.items()} == {
        "new": (1, 1),
        "old": (1, 0),
    }
    assert sides["new"].last_failure == "a: worker w: lost"
    # After a migration the times say nothing of either.
    assert not sides["old"].itl_ms


@pytest.mark.parametrize(("cause", "failures"), [("lost", 1), ("timed out", 1), ("refused", 0)])
def test_a_worker_that_turns_a_request_down_has_not_failed(cause: str, failures: int) -> None:
    """It is full, or drains."""
    sides = fold(
        Evidence("revision", 10), decided("a-0-1", "new"), *(routed("a"), stepped("a", cause), ended("a"))
    )
    assert sides["new"].failures == failures


def test_errors_count_and_clients_that_leave_do_not() -> None:
    """An answer with an error is a failure of its worker's side."""
    sides = fold(
        Evidence("revision", 10),
        *(decided(f"{name}-0-1", "new") for name in "abc"),
        *(routed("a"), ended("a", "error", error="the engine is dead")),
        *(routed("b"), ended("b", "cancelled")),
        *(routed("c"), ended("c")),
    )
    assert (sides["new"].attempts, sides["new"].failures) == (3, 1)


def test_what_was_decided_before_or_for_a_client_that_chose_counts_for_no_side() -> None:
    """Nor does a request of another pool, whose decisions are in another log."""
    found = Evidence("revision", 10)
    sides = fold(
        found,
        decided("a-0-1", "new", position=9),
        decided("b-0-1", "new", constraints=Constraints(revision="new")),
        *(routed("a"), ended("a"), routed("b"), ended("b"), routed("c"), ended("c")),
    )
    assert sides == {}


def test_policies_are_those_that_were_drawn() -> None:
    """A query that stated its policy says nothing of the split."""
    draw = Draw((("kv", 1.0), ("slo", 1.0)), "slo", "slo")
    sides = fold(
        Evidence("policy", 10),
        decided("a-0-1", "r", policy_draw=draw),
        decided("b-0-1", "r"),
        *(routed("a"), ended("a"), routed("b"), ended("b")),
    )
    assert list(sides) == ["slo"]


def test_what_is_followed_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest requests are forgotten."""
    monkeypatch.setattr(module, "OPEN_MAX", 3)
    found = Evidence("revision", 10)
    for number in range(9):
        fold(found, routed(f"r{number}"), decided(f"r{number}-0-1", "new"))
    sides = fold(found, *(ended(f"r{number}") for number in range(9)))
    assert sides["new"].attempts == 3
