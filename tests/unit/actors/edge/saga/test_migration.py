"""What a request needs of a worker, and which requests may go on at another one."""

import pytest

from headwater.actors.edge.saga.saga import is_migratable, migration_blocker
from headwater.schemas.inference import Guide, Sampling
from headwater.schemas.tables import required_capabilities

FREE = Sampling(10, logprobs=0, logit_bias={1: 1.0}, seed=3)
GUIDED = Sampling(10, guide=Guide("json_object"))
PROCESSED = Sampling(10, processors={"shout": {}})
PENALISED = Sampling(10, temperature=0.0, presence_penalty=0.5)
COUNTED = Sampling(10, frequency_penalty=-0.5)


def test_needs_are_the_capabilities_that_the_engine_must_have() -> None:
    """Nothing for a plain request, so that workers of older releases are asked too."""
    assert required_capabilities(Sampling(10)) == ()
    assert required_capabilities(FREE) == ("logprobs", "logit_bias")
    assert required_capabilities(GUIDED) == ("guide",)
    assert required_capabilities(PROCESSED) == ("processors",)


@pytest.mark.parametrize("sampling", [GUIDED, PROCESSED, PENALISED, COUNTED])
def test_state_that_only_the_engine_has_does_not_move(sampling: Sampling) -> None:
    """Before the first token there is none yet."""
    assert is_migratable(sampling, 0)
    assert not is_migratable(sampling, 1)
    assert "after 1 tokens" in migration_blocker(sampling, 1)


def test_a_free_answer_moves_at_any_time() -> None:
    """Its tokens are all there is."""
    assert is_migratable(FREE, 0)
    assert is_migratable(FREE, 9)
    # It counts the prompt too, which holds the answer so far after a move.
    assert is_migratable(Sampling(10, repetition_penalty=1.2), 9)
