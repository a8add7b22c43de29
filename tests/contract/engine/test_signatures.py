"""What was recorded of SGLang's calls is what the installed release has."""

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.engines.sglang import config, signatures
from headwater.engines.sglang import config as sglang_config
from tests.support.sglang import environment

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not environment.HERE, reason="SGLang is installed in its own environment"),
    pytest.mark.filterwarnings("ignore"),
]


def test_the_record_is_true(sglang_model: str) -> None:
    """And no release is unknown here, so that nothing is looked at when an engine starts."""
    lacks = {name: missing for name, missing in signatures.inspected().items() if missing}
    assert lacks == signatures.LACKS[sglang_config.installed()]


def test_native_arguments_are_those_of_sglang(sglang_model: str) -> None:
    """Parsed by itself; what it does not know is named with what it may have meant."""
    words = ("--tp-size", "2", "--max-running-requests=4", "--enable-lora", "--no-enable-metrics")
    assert config.parse(words) == {"tp_size": 2, "max_running_requests": 4, "enable_lora": True}
    with pytest.raises(
        EngineUnavailable, match=r"no engine argument --enable-lorra: did you mean --enable-lora\?"
    ):
        config.parse(("--enable-lorra",))
    with pytest.raises(EngineUnavailable, match="--tp-size"):
        config.parse(("--tp-size", "two"))
