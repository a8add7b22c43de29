"""The double's logits: of prompts, and what a request's bias and processors make of those of an answer."""

from typing import Any

import numpy as np

from headwater.schemas import hashing
from headwater.schemas.inference import GenerateRequest

VOCABULARY = 512


class Tensor:
    """As much of a tensor as the adapter uses."""

    def __init__(self, values: "np.ndarray") -> None:
        self.values = values
        self.shape = values.shape

    def __getitem__(self, key: Any) -> "Tensor":
        return Tensor(self.values[key])

    def float(self) -> "Tensor":
        """As float32."""
        return Tensor(self.values.astype(np.float32))

    def cpu(self) -> "Tensor":
        """In host memory."""
        return self

    def numpy(self) -> "np.ndarray":
        """As an array."""
        return self.values


def logits_of(request: GenerateRequest) -> Tensor:
    """Logits after each token of a prompt: that of the token that follows is 5, of token 7 it is 6, of all others 0."""
    tokens = hashing.unpack_tokens(request.tokens).tolist()
    values = np.zeros((1, len(tokens), VOCABULARY), np.float32)
    values[0, :, 7] = 6.0
    for at, token in enumerate(tokens[1:]):
        values[0, at, token] = 5.0
    return Tensor(values[0])


def picked(token: int, params: Any, request: GenerateRequest, output: list[int]) -> int:
    """The likeliest token after `output` once bias and processors were applied; without them `token`."""
    if params.embedding_bias is None and not params.logits_processor:
        return token
    logits = np.zeros((1, 1, VOCABULARY), np.float32)
    logits[0, 0, token] = 1.0
    if params.embedding_bias is not None:
        logits += params.embedding_bias
    prompt = hashing.unpack_tokens(request.tokens).tolist()
    for one in params.logits_processor or ():
        one(1, logits, [prompt + output], None, None)
    return int(logits[0, 0].argmax())
