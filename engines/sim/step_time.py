"""The simulator's model of the duration of an engine step.

The default coefficients were derived from single-request runs of NVIDIA Dynamo 1.2.1's mocker (its default timing model);
they represent an 8B-class model on one datacentre GPU.
"""

from typing import NamedTuple


class StepTime(NamedTuple):
    """prefill(x) + decode(p) milliseconds for a step that computes x prompt tokens.

    `p` is the fraction of KV blocks in use; decode(p) counts when any sequence gets a token in the step.
    """

    prefill_ms: tuple[float, float, float] = (4.209989e-07, 1.518344e-02, 16.50142)
    decode_ms: tuple[float, float, float] = (-25.74, 54.01, 5.74)

    def seconds(self, prompt_tokens: int, used_fraction: float, decoding: bool) -> float:
        """Duration of one step in seconds."""
        total = _polynomial(self.prefill_ms, prompt_tokens) if prompt_tokens else 0.0
        if decoding:
            total += _polynomial(self.decode_ms, used_fraction)
        return total / 1000


ZERO = StepTime((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
"""Zero duration: for measuring everything except the engine."""


def _polynomial(coefficients: tuple[float, float, float], x: float) -> float:
    square, linear, constant = coefficients
    return (square * x + linear) * x + constant
