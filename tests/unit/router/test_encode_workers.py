"""Which encode worker may compute the embedding of an image: one whose embeddings the serving worker takes."""

import pytest

from headwater.router.decide import DecisionContext, decide, prompt_of
from headwater.router.state import RouterState
from headwater.schemas.events import WorkerJoined
from headwater.schemas.routing import Constraints, Decision, RouteQuery, RouteRefused, Weights
from tests.support.data.examples import packed, record
from tests.support.data.story import fold

ENCODERS = {"e-vllm": ("vllm", "vllm"), "e-sglang": ("sglang", "sglang"), "e-declared": ("sglang", "vllm")}
"""Engine and format of the embeddings, by name."""


def state(*encoders: str) -> RouterState:
    """Encode workers and one that serves."""
    joined = [WorkerJoined("w", 1, "m", "vllm", "both", 16, 100, 256, pairs_with="vllm/1")]
    for name in encoders:
        engine, form = ENCODERS[name]
        joined.append(
            WorkerJoined(
                name, 1, "m", engine, "encode", 16, 100, 1, pairs_with=form, capabilities=("encode",)
            )
        )
    return fold([record(at + 1, one, writer=one.worker) for at, one in enumerate(joined)])


def ask(state: RouterState, form: str, exclude: tuple[str, ...] = ()) -> Decision | RouteRefused:
    """Where an image goes for a worker that takes this format."""
    wanted = Constraints(needs=("encode",), pairs_with=form, exclude=exclude)
    query = RouteQuery("r-0-1-e0-0", 64, 0, packed(1, 2, 3, 4), wanted)
    standing = DecisionContext(1, state.position, 0, 0, Weights(), False)
    return decide(state.index, state.loads, state.cold, prompt_of(query), query, standing)


@pytest.mark.parametrize(
    ("form", "allowed"), [("vllm", {"e-vllm", "e-declared"}), ("sglang", {"e-sglang"}), ("other", set())]
)
def test_only_encode_workers_of_the_format_are_candidates(form: str, allowed: set[str]) -> None:
    """Their engine does not matter, what is declared does."""
    reply = ask(state(*ENCODERS), form)
    if not allowed:
        assert isinstance(reply, RouteRefused)
        assert "computes embeddings of the format other" in reply.reason
        return
    assert isinstance(reply, Decision)
    assert {candidate.worker for candidate in reply.candidates} == allowed
    assert reply.worker in allowed


def test_engine_weights_are_those_of_requests() -> None:
    """An encode worker of an engine that gets no new request may still encode for one that does."""
    fleet = state("e-declared")
    fleet.loads.engine_weights = {"vllm": 1.0, "sglang": 0.0}
    reply = ask(fleet, "vllm")
    assert isinstance(reply, Decision)
    assert (reply.worker, reply.draw) == ("e-declared", None)


def test_another_format_is_no_fallback() -> None:
    """Where the only fitting one has just failed, the serving worker encodes."""
    reply = ask(state("e-vllm", "e-sglang"), "vllm", exclude=("e-vllm.1",))
    assert isinstance(reply, RouteRefused)
