"""The words of `headwater ctl weights`, and what it says where nothing can be set."""

import pytest

from headwater.ops.config.setting import ConfigError
from headwater.ops.operator.ctl import parse_weights


def test_words_are_weights() -> None:
    """None to show, {} to remove, else by engine."""
    assert parse_weights([]) is None
    assert parse_weights(["remove"]) == {}
    assert parse_weights(["vllm=0.95", "sglang=0"]) == {"vllm": 0.95, "sglang": 0.0}
    assert parse_weights(["vllm=19", "sglang=1"]) == {"vllm": 19.0, "sglang": 1.0}


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (["vllm"], "got 'vllm'"),
        (["=1"], "got '=1'"),
        (["vllm=1", "remove"], "got 'remove'"),
        (["vllm=1", "vllm=2"], "vllm has two weights"),
        (["vllm="], "vllm=: a weight is a finite number"),
        (["vllm=nan"], "vllm=nan: a weight is"),
        (["vllm=inf"], "vllm=inf: a weight is"),
        (["vllm=-0.1"], "vllm=-0.1: a weight is"),
        (["vllm=0", "sglang=0"], "every weight is 0"),
    ],
)
def test_words_that_are_none_are_named(words: list[str], mistake: str) -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError) as raised:
        parse_weights(words)
    assert mistake in str(raised.value)
