"""An answer that has begun needs a worker with its tokenizer."""

from headwater.actors.edge.saga.types import (
    MOVE_S_MAX,
    AskRouter,
    ChoiceSpec,
    Finish,
    Frame,
    LegLost,
    RouterRefused,
    Saga,
)
from headwater.schemas.inference import FrameEntry, Sampling
from headwater.schemas.routing import RouteRefused
from tests.support.worlds.edge import EdgeWorld
from tests.unit.actors.edge.saga.test_saga import DECODING, MAX_TOKENS, OPENED, run


def test_an_answer_that_has_begun_is_bound_to_its_tokenizer() -> None:
    """From its first token on: before, any worker may begin. Where none has it, the end names the reason."""
    bound = Saga(ChoiceSpec("r", 0, Sampling(MAX_TOKENS), tokenizer="aa"))
    saga, [ask] = run(OPENED, saga=bound)
    assert isinstance(ask, AskRouter)
    assert ask.constraints.tokenizer == ""
    _, effects = run(*DECODING, LegLost(1, "gone", 0.0), saga=bound)
    assert [one.constraints.tokenizer for one in effects if isinstance(one, AskRouter)] == [""]
    saga, effects = run(*DECODING, Frame(FrameEntry(1, 0, (5,)), 0.0), LegLost(1, "gone", 0.0), saga=bound)
    assert [one.constraints.tokenizer for one in effects if isinstance(one, AskRouter)] == ["aa"]
    refused = RouteRefused("none of the 2 workers has the tokenizer of the answer so far")
    saga, effects = run(RouterRefused(2, refused, 0.0, MOVE_S_MAX + 1), saga=saga)
    finish = effects[-1]
    assert isinstance(finish, Finish)
    assert finish.error is not None
    assert refused.reason in str(finish.error)
    assert saga.end == "error"


def test_an_edge_states_the_tokenizer_of_the_model_that_it_serves() -> None:
    """That of the card by which it has read the prompt and writes the text."""
    with EdgeWorld() as edge:
        edge.breaks_after.append(1)
        answer = edge.ask("/v1/completions", {"model": "m", "prompt": "Hello.", "max_tokens": 4})
        assert answer.status == 200
        first, moved = edge.queries
        assert first.constraints.tokenizer == ""
        assert moved.constraints.tokenizer == edge.models.get("m").card.tokenizer != ""
