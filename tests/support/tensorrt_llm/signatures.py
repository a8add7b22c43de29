"""Classes generated from the recorded signatures of TensorRT-LLM: they take its arguments and no others."""

import inspect
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from headwater.engines.tensorrt_llm import config


def signature_of(names: Iterable[str], *, first: str = "self") -> inspect.Signature:
    """A signature of keyword arguments that may be left out; with its first one by position."""
    kinds = inspect.Parameter
    own = [kinds(first, kinds.POSITIONAL_OR_KEYWORD)]
    return inspect.Signature(
        own + [kinds(name, kinds.POSITIONAL_OR_KEYWORD, default=None) for name in names if name != first]
    )


def check_arguments(names: Iterable[str], given: Iterable[str], what: str) -> None:
    """As Python itself: TypeError for an argument that the real one does not have."""
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise TypeError(f"{what} got an unexpected keyword argument {unknown[0]!r}")


def generated(name: str, fields: Iterable[str], defaults: dict[str, Any] | None = None) -> Any:
    """A class with these fields, None where not given."""
    ordered = tuple(fields)

    def init(self: Any, *positional: Any, **given: Any) -> None:
        check_arguments(ordered, given, name)
        values = dict.fromkeys(ordered) | (defaults or {}) | dict(zip(ordered, positional)) | given
        vars(self).update(values)

    init.__signature__ = signature_of(ordered)  # type: ignore[attr-defined]
    made: Any = type(name, (), {"__init__": init})
    made.__signature__ = signature_of(ordered).replace(
        parameters=list(signature_of(ordered).parameters.values())[1:]
    )
    return made


SamplingParams = generated(
    "SamplingParams",
    sorted(config.SAMPLING_PARAMS),
    {"max_tokens": 32, "n": 1, "return_context_logits": False},
)
GuidedDecodingParams = generated("GuidedDecodingParams", sorted(config.GUIDED_DECODING_PARAMS))
DisaggregatedParams = generated("DisaggregatedParams", config.DISAGGREGATED_PARAMS)
SchedulingParams = generated("SchedulingParams", config.SCHEDULING_PARAMS, {"attention_dp_relax": True})
LoRARequest = generated("LoRARequest", config.LORA_REQUEST)


class DisaggScheduleStyle(IntEnum):
    """How both legs are scheduled."""

    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1
