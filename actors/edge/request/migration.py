"""Whether a request can continue on another worker. Pure.

An engine that continues an answer gets the tokens so far as part of the prompt. What the first engine kept in addition
is lost: the state of a grammar, the counts of a logits processor. The second engine would start from scratch and
produce an answer that the client did not ask for, so such a request ends with an error instead.

A request that engines die of would end one incarnation after the other, and with each what else ran there. It is not
tried again after `DEATHS_MAX`.
"""

from typing import Final

from headwater.schemas.messages.inference import Sampling

DEATHS_MAX: Final = 3
"""Incarnations of workers that may end with a request; then it counts as the cause."""


def is_migratable(sampling: Sampling, emitted: int) -> bool:
    """Whether a request with `emitted` tokens can continue elsewhere; before the first one it always can."""
    return not emitted or not _engine_state(sampling)


def migration_blocker(sampling: Sampling, emitted: int) -> str:
    """The error message for a request that cannot move."""
    return f"{_engine_state(sampling)} after {emitted} tokens was lost with the worker, so it cannot continue; retry"


def _engine_state(sampling: Sampling) -> str:
    """What the engine derived from the tokens that it generated, and another one would start from scratch; "": nothing.

    A repetition penalty counts the prompt too, which contains the answer so far after a move.
    """
    if sampling.guide is not None:
        return "its grammar's state"
    if sampling.processors:
        return "the state of its logits processors"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "the counts of its presence and frequency penalties"
    if sampling.thinking_budget is not None:
        return "the count of its thinking budget"
    return ""


def is_blamed(finish: str, received: int) -> bool:
    """Does the end of a worker's incarnation count against a request that it had sent `received` tokens of?

    `finish` as in `FrameEntry`, "lost" for a worker that is. If the engine says that it died of this request, yes. If
    it merely died, only where it had sent nothing: a request that breaks engines breaks them before its next token, and
    one that streamed was most likely a bystander.
    """
    return finish == "fatal" or (finish in ("died", "lost") and not received)


FAILURES: Final = ("error", "died", "fatal")
"""How a leg ends whose engine failed, as in `FrameEntry.finish`."""


def is_gone(finish: str) -> bool:
    """Did the worker say that its engine is dead? A worker that is merely "lost" may come back: its connection may have failed."""
    return finish in ("died", "fatal")
