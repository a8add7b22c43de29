"""What a request says about single tokens: bias, allowed tokens, words that must not occur.

Bias and allowed tokens are one tensor, `embedding_bias`, which TensorRT-LLM adds to the logits. A word of several tokens
needs a logits processor: its last token is forbidden only after the others.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from headwater.engines.engine import RequestRejected
from headwater.schemas.messages.inference import Sampling

FORBIDDEN: Final = -1e9
"""Far below any logit; minus infinity would make 0 x infinity of a softmax over nothing."""


def bias_of(sampling: Sampling, vocabulary: int) -> np.ndarray | None:
    """One value per token of the vocabulary, None if the request has no use for it. Raises `RequestRejected`."""
    if not sampling.logit_bias and not sampling.allowed_token_ids:
        return None
    named = [*sampling.logit_bias, *sampling.allowed_token_ids]
    wrong = [token for token in named if not 0 <= token < vocabulary]
    if wrong:
        param = "logit_bias" if wrong[0] in sampling.logit_bias else "allowed_token_ids"
        raise RequestRejected(
            f"token {wrong[0]} is not in the vocabulary of {vocabulary} tokens", param=param
        )
    bias = np.zeros(vocabulary, np.float32)
    if sampling.allowed_token_ids:
        bias.fill(FORBIDDEN)
        bias[list(sampling.allowed_token_ids)] = 0.0
    for token, value in sampling.logit_bias.items():
        bias[token] += value
    return bias


class BannedSequences:
    """A logits processor that forbids the last token of each sequence after the tokens before it.

    Called by TensorRT-LLM, in its process: it must not raise, and changes the logits where they are.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], prompt: int) -> None:
        self._sequences = [tuple(sequence) for sequence in sequences if sequence]
        self._prompt = prompt
        """Length of the prompt: a word may begin in it no more than it may end there."""

    def __call__(
        self,
        req_id: int,
        logits: Any,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        """Change the logits of one step: shape (1, beams, vocabulary). See `LogitsProcessor` of TensorRT-LLM."""
        for beam, tokens in enumerate(token_ids):
            answer = tuple(tokens[self._prompt :])
            for sequence in self._sequences:
                before = sequence[:-1]
                if not before or answer[-len(before) :] == before:
                    logits[:, beam, sequence[-1]] = FORBIDDEN


def banned_sequences(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of each word, at the beginning of a text and inside of one. `tokenizer` is of `tokenizers`."""
    found: list[list[int]] = []
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            if tokens and tokens not in found:
                found.append(tokens)
    return found
