"""Which worker may take a request with media: one that processes them with the settings of the ids."""

import pytest

from headwater.router.decide import DecisionContext, decide, prompt_of
from headwater.router.state import RouterState
from headwater.schemas.events import WorkerJoined
from headwater.schemas.routing import Constraints, Decision, RouteQuery, RouteRefused, Weights
from tests.support.data.examples import packed, record
from tests.support.data.story import fold

WORKERS = {"old": "settings-1", "new": "settings-2", "released": ""}
"""Digests by name; a worker of an earlier release published none."""


def state(*workers: str) -> RouterState:
    """Workers that differ in their settings for media."""
    joined = [
        WorkerJoined(name, 1, "m", "vllm", "both", 16, 100, 256, media_processor=WORKERS[name])
        for name in workers
    ]
    return fold([record(at + 1, one, writer=one.worker) for at, one in enumerate(joined)])


def ask(state: RouterState, digest: str) -> Decision | RouteRefused:
    """Where a request with media goes, whose ids stand for these settings; "" for one without."""
    query = RouteQuery("r-0-1", 64, 0, packed(1, 2, 3, 4), Constraints(media_processor=digest))
    standing = DecisionContext(1, state.position, 0, 0, Weights(), False)
    return decide(state.index, state.loads, state.cold, prompt_of(query), query, standing)


@pytest.mark.parametrize(
    ("digest", "allowed"),
    [
        ("settings-1", {"old", "released"}),
        ("settings-2", {"new", "released"}),
        ("", {"old", "new", "released"}),
    ],
)
def test_only_workers_with_these_settings_are_candidates(digest: str, allowed: set[str]) -> None:
    """Requests without media go to all."""
    reply = ask(state(*WORKERS), digest)
    assert isinstance(reply, Decision)
    assert {candidate.worker for candidate in reply.candidates} == allowed


def test_without_such_a_worker_the_reason_is_named() -> None:
    """As after a roll-out that was stopped half-way."""
    reply = ask(state("old"), "settings-2")
    assert isinstance(reply, RouteRefused)
    assert "processes media with the settings of the model card" in reply.reason
