"""Cuts what an engine yields into the steps of one answer: as many tokens as requested, and exactly one end. Pure."""

from collections.abc import Collection, Sequence
from typing import Any

from headwater.engines.custom.api import Output
from headwater.engines.engine import Finish, Step
from headwater.schemas.messages.inference import Sampling


class AnswerCutter:
    """One answer. `eos` are the model's end tokens; `produced` counts the tokens so far."""

    def __init__(self, sampling: Sampling, eos: Collection[int]) -> None:
        self.produced = 0
        self._sampling = sampling
        self._stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._stops |= frozenset(eos)

    def take(self, output: Output) -> Step:
        """The step for what the engine yielded; the last one has a finish. Raises TypeError for another type."""
        step = output if isinstance(output, Step) else Step(_tokens(output))
        kept, finish = self._cut(step.tokens)
        if len(kept) < len(step.tokens):
            step = step._replace(tokens=kept, logprobs=step.logprobs[: len(kept)])
        self.produced += len(kept)
        return step._replace(finish=finish or step.finish)

    def end(self) -> Step:
        """The step for the end of the generator: the model ended its answer."""
        return Step((), "stop")

    def _cut(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], Finish]:
        sampling = self._sampling
        for index, token in enumerate(tokens):
            count = self.produced + index + 1
            if token in self._stops and count >= sampling.min_tokens:
                return tuple(tokens[: index + 1]), "stop"
            if count >= sampling.max_tokens:
                return tuple(tokens[: index + 1]), "length"
        return tuple(tokens), ""


def _tokens(output: Any) -> tuple[int, ...]:
    if isinstance(output, int):
        return (output,)
    is_sequence = isinstance(output, Sequence) and not isinstance(output, str | bytes)
    if is_sequence and all(isinstance(token, int) for token in output):
        return tuple(output)
    raise TypeError(
        f"generate yielded {type(output).__name__}: yield a token id, a sequence of them, or a Step"
    )
