"""Which capabilities a request needs of a worker, and whether what is left of it can go on at another one. Pure.

An engine that takes an answer over gets the tokens so far as part of the prompt. What the first engine kept beside
them is gone: how far a grammar was, what a logits processor had counted. The new one would begin at the start and
give an answer that no client asked for, so such a request ends with an error instead.
"""

from headwater.engines.engine import Capability
from headwater.schemas.inference import Sampling


def needs_of(sampling: Sampling) -> tuple[Capability, ...]:
    """What a worker must be able to do: `RouteQuery.needs`."""
    wants: tuple[tuple[bool, Capability], ...] = (
        (sampling.logprobs is not None, "logprobs"),
        (bool(sampling.logit_bias), "logit_bias"),
        (sampling.guide is not None, "guide"),
        (bool(sampling.processors), "processors"),
    )
    return tuple(capability for wanted, capability in wants if wanted)


def can_move(sampling: Sampling, emitted: int) -> bool:
    """May a request that has given `emitted` tokens to its client go on elsewhere? Before the first it always may."""
    return not emitted or not _state_of(sampling)


def why_not(sampling: Sampling, emitted: int) -> str:
    """What to tell the client of a request that can not move."""
    return f"{_state_of(sampling)} after {emitted} tokens was lost with the worker, so it can not go on: send it again"


def _state_of(sampling: Sampling) -> str:
    """What the engine keeps of the tokens that it generated, and another one would begin anew; empty for nothing.

    A repetition penalty counts the prompt too, which holds the answer so far after a move.
    """
    if sampling.guide is not None:
        return "its grammar's state"
    if sampling.processors:
        return "the state of its logits processors"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "the counts of its presence and frequency penalties"
    return ""
