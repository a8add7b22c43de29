"""A model's own sampling defaults (its generation_config.json), which its card has."""

import msgspec
import pytest

from headwater.actors.edge.prompt.prepare import sampling_of
from headwater.actors.edge.prompt.request import SamplingFields

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05}


def test_what_a_request_leaves_out_is_the_models() -> None:
    """As vLLM and SGLang serve it."""
    sampling = sampling_of(SamplingFields(), limit=5, defaults=DEFAULTS)
    assert {name: getattr(sampling, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 1.0),
        ("top_p", 1.0),
        ("top_k", 0),
        ("min_p", 0.0),
        ("repetition_penalty", 1.0),
    ],
)
def test_what_a_request_says_counts(name: str, value: float) -> None:
    """Also where it is what a model without defaults has."""
    sampling = sampling_of(msgspec.convert({name: value}, SamplingFields), limit=5, defaults=DEFAULTS)
    assert getattr(sampling, name) == value
    others = DEFAULTS.keys() - {name}
    assert all(getattr(sampling, other) == DEFAULTS[other] for other in others)


def test_without_defaults_they_are_those_of_the_apis() -> None:
    sampling = sampling_of(SamplingFields(), limit=5)
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0, 1.0)
