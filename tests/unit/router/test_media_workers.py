"""Which worker may take media: one that processes them with the settings of their ids, and one whose embeddings the serving worker takes."""

import pytest

from headwater.router.state import RouterState
from headwater.schemas.events import WorkerJoined
from headwater.schemas.routing import Decision, RouteRefused
from tests.support.data.examples import packed
from tests.support.data.queries import route_query
from tests.support.data.story import fleet_of, reply_on

ENCODERS = {"e-vllm": ("vllm", "vllm"), "e-sglang": ("sglang", "sglang"), "e-declared": ("sglang", "vllm")}
"""Engine and format of the embeddings, by name."""

SETTINGS = {"old": "settings-1", "new": "settings-2", "released": ""}
"""Digests of workers' settings for media, by name; a worker of an earlier release published none."""

PROMPT = packed(1, 2, 3, 4)


def encoders(*names: str) -> RouterState:
    """Encode workers and one that serves."""
    found = [WorkerJoined("w", 1, "m", "vllm", "both", 16, 100, 256, pairs_with="vllm/1")]
    for name in names:
        engine, form = ENCODERS[name]
        found.append(WorkerJoined(name, 1, "m", engine, "encode", 16, 100, 1, form, ("encode",)))
    return fleet_of(*found)


def processors(*names: str) -> RouterState:
    """Workers that differ in their settings for media."""
    return fleet_of(
        *(
            WorkerJoined(name, 1, "m", "vllm", "both", 16, 100, 256, media_processor=SETTINGS[name])
            for name in names
        )
    )


def ask(state: RouterState, form: str, exclude: tuple[str, ...] = ()) -> Decision | RouteRefused:
    """Where an image goes for a worker that takes this format."""
    wanted = {"needs": ("encode",), "pairs_with": form, "exclude": exclude}
    return reply_on(state, route_query("r-0-1-e0-0", 64, 0, PROMPT, **wanted))


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
    reply = reply_on(processors(*SETTINGS), route_query("r-0-1", 64, 0, PROMPT, media_processor=digest))
    assert isinstance(reply, Decision)
    assert {candidate.worker for candidate in reply.candidates} == allowed


def test_without_a_worker_of_these_settings_the_reason_is_named() -> None:
    """As after a roll-out that was stopped half-way."""
    reply = reply_on(processors("old"), route_query("r-0-1", 64, 0, PROMPT, media_processor="settings-2"))
    assert isinstance(reply, RouteRefused)
    assert "processes media with the settings of the model card" in reply.reason


@pytest.mark.parametrize(
    ("form", "allowed"), [("vllm", {"e-vllm", "e-declared"}), ("sglang", {"e-sglang"}), ("other", set())]
)
def test_only_encode_workers_of_the_format_are_candidates(form: str, allowed: set[str]) -> None:
    """Their engine does not matter, what is declared does."""
    reply = ask(encoders(*ENCODERS), form)
    if not allowed:
        assert isinstance(reply, RouteRefused)
        assert "computes embeddings of the format other" in reply.reason
        return
    assert isinstance(reply, Decision)
    assert {candidate.worker for candidate in reply.candidates} == allowed
    assert reply.worker in allowed


def test_engine_weights_are_those_of_requests() -> None:
    """An encode worker of an engine that gets no new request may still encode for one that does."""
    fleet = encoders("e-declared")
    fleet.loads.engine_weights = {"vllm": 1.0, "sglang": 0.0}
    reply = ask(fleet, "vllm")
    assert isinstance(reply, Decision)
    assert (reply.worker, reply.draw) == ("e-declared", None)


def test_another_format_is_no_fallback() -> None:
    """Where the only fitting one has just failed, the serving worker encodes."""
    reply = ask(encoders("e-vllm", "e-sglang"), "vllm", exclude=("e-vllm.1",))
    assert isinstance(reply, RouteRefused)
