"""An answer that has begun needs a worker with its tokenizer."""

from headwater.actors.edge.request.placement import MOVE_S_MAX
from headwater.actors.edge.request.saga_types import (
    AskRouter,
    ChoiceSpec,
    Finish,
    Frame,
    LegLost,
    RouterRefused,
    Saga,
)
from headwater.schemas.events.route import RouteRefused
from headwater.schemas.messages.inference import FrameEntry, Sampling
from tests.unit.actors.edge.request.test_saga import DECODING, MAX_TOKENS, OPENED, run


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
