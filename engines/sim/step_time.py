"""The simulator's model of the duration of an engine step.

The default coefficients were derived from single-request runs of NVIDIA Dynamo 1.2.1's mocker (its default timing model);
they represent an 8B-class model on one datacentre GPU. Those of images were measured on an H200, with a vision encoder of
Qwen2-VL's shape (docs/benchmarks/images.md).
"""

from collections.abc import Iterable
from typing import NamedTuple


class StepTime(NamedTuple):
    """prefill(x) + decode(p) milliseconds for a step that computes x prompt tokens.

    `p` is the fraction of KV blocks in use; decode(p) counts when any sequence gets a token in the step. The images that a step encodes
    take A·n² + B·n for each, of n tokens, and C once: `encode_ms` is (A, B, C).
    """

    prefill_ms: tuple[float, float, float] = (4.209989e-07, 1.518344e-02, 16.50142)
    decode_ms: tuple[float, float, float] = (-25.74, 54.01, 5.74)
    encode_ms: tuple[float, float, float] = (1.09e-05, 3.51e-03, 12.7)

    def seconds(self, prompt_tokens: int, used_fraction: float, decoding: bool) -> float:
        """Duration of one step in seconds."""
        total = _polynomial(self.prefill_ms, prompt_tokens) if prompt_tokens else 0.0
        if decoding:
            total += _polynomial(self.decode_ms, used_fraction)
        return total / 1000

    def encode_seconds(self, images: Iterable[int]) -> float:
        """Time to encode images of these numbers of tokens in one step, in seconds."""
        square, linear, constant = self.encode_ms
        each = [(square * tokens + linear) * tokens for tokens in images]
        return (sum(each) + constant) / 1000 if each else 0.0


ZERO = StepTime((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
"""Zero duration: for measuring everything except the engine."""


def _polynomial(coefficients: tuple[float, float, float], x: float) -> float:
    square, linear, constant = coefficients
    return (square * x + linear) * x + constant
