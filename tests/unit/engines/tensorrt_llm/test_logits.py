"""What bias and bad words do to logits."""

import numpy as np
import pytest

from headwater.engines.model_files import byte_tokenizer
from headwater.engines.tensorrt_llm.sampling import FORBIDDEN, BannedSequences, banned_sequences, bias_of
from headwater.schemas.inference import Sampling

PROMPT = [1, 2, 3]


def forbidden(sequences: list[list[int]], answer: list[int]) -> list[int]:
    """Tokens that may not follow this answer."""
    logits = np.zeros((1, 1, 10), np.float32)
    BannedSequences(sequences, len(PROMPT))(7, logits, [PROMPT + answer], None, None)
    return [int(token) for token in np.flatnonzero(logits[0, 0] == FORBIDDEN)]


@pytest.mark.parametrize(
    ("answer", "tokens"), [([], [9]), ([4], [5, 9]), ([4, 4], [5, 9]), ([4, 5], [9]), ([5, 4, 8], [9])]
)
def test_last_token_of_a_word_is_forbidden_after_the_others(answer: list[int], tokens: list[int]) -> None:
    """And a word of one token always."""
    assert forbidden([[4, 5], [9], []], answer) == tokens


def test_word_does_not_begin_in_the_prompt() -> None:
    assert forbidden([[3, 5]], []) == []
    assert forbidden([[2, 3, 5]], [3]) == []


def test_word_is_banned_at_the_beginning_and_inside_of_a_text() -> None:
    found = [byte_tokenizer().decode(tokens) for tokens in banned_sequences(("no", " way"), byte_tokenizer())]
    assert found == ["no", " no", " way"]


def test_bias_is_added_and_other_tokens_than_the_allowed_ones_are_not_possible() -> None:
    assert bias_of(Sampling(1), 4) is None
    biased = bias_of(Sampling(1, logit_bias={2: -1.5}), 4)
    assert biased is not None
    assert biased.tolist() == [0.0, 0.0, -1.5, 0.0]
    allowed = bias_of(Sampling(1, logit_bias={2: 1.0}, allowed_token_ids=(1, 2)), 4)
    assert allowed is not None
    assert (allowed[0] < -1e8, allowed[1], allowed[2]) == (True, 0.0, 1.0)
