"""Settings that SGLang needs for a Whisper model, and how it is told which tokens are allowed."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.engines.sglang import SglangOptions, sampling
from headwater.engines.sglang.sampling import SglangSpeech, is_whisper, speech_settings
from headwater.schemas.inference import Sampling
from tests.support.engines.settings import engine_settings, with_fields

SETTINGS = engine_settings(SglangOptions(), "folder", max_model_len=448)


def test_only_a_whisper_is_one(tmp_path: Path) -> None:
    """By its configuration; a folder without one is SGLang's to reject."""
    assert not is_whisper(str(tmp_path))
    for kind in ("whisper", "llama"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert is_whisper(str(tmp_path)) == (kind == "whisper")
    (tmp_path / "config.json").write_text("[]")
    assert not is_whisper(str(tmp_path))


def test_a_whisper_has_pages_of_one_token_and_no_chunks() -> None:
    """SGLang ends with others. Its context has room for the recording; the operator's bound is the adapter's."""
    made, given = speech_settings(SETTINGS, {"tp_size": 2})
    assert (made.worker.block_size, made.worker.max_model_len) == (1, 0)
    assert given == {"tp_size": 2, "chunked_prefill_size": -1, "max_prefill_tokens": 8192}
    own = {"max_prefill_tokens": 4096, "chunked_prefill_size": -1}
    assert speech_settings(SETTINGS, own)[1] == own


def test_settings_that_would_end_it_are_rejected() -> None:
    """By their flags."""
    with pytest.raises(EngineUnavailable, match="--block-size 16"):
        speech_settings(with_fields(SETTINGS, block_size=16), {})
    with pytest.raises(EngineUnavailable, match="--chunked-prefill-size 2048"):
        speech_settings(SETTINGS, {"chunked_prefill_size": 2048})


def test_a_release_without_a_processor_is_named() -> None:
    """Not with an error of ours."""
    with pytest.raises(EngineUnavailable, match=r"install 0\.5\.23"):
        SglangSpeech(SimpleNamespace(mm_processor=None))


def test_allowed_tokens_are_preferred_to_all_others() -> None:
    """With the biases that the request has; without either there is none."""
    made = sampling.answer(Sampling(1, allowed_token_ids=(3, 5), logit_bias={5: 2.0, 7: 1.0}))
    assert made["logit_bias"] == {"3": 100.0, "5": 102.0, "7": 1.0}
    assert "logit_bias" not in sampling.answer(Sampling(1))
