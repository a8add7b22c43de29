"""Recordings as vLLM gets them: one of the stated size and a length that the model hears at once."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headwater.actors.worker.health import silence
from headwater.engines.engine import RequestRejected
from headwater.engines.vllm.media import speech_prompt
from headwater.schemas.inference import GenerateRequest, Sampling
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import SpeechSupport

SUPPORT = SpeechSupport(
    window_s=1.0,
    rate_hz=1_000,
    start=1,
    previous=2,
    no_timestamps=3,
    first_timestamp=4,
    timestamp_s=0.02,
    prompt_max=8,
)
SAMPLES = np.linspace(-1, 1, 1_000, dtype=np.float32)
ITEM = PromptMedia("recording", "id", 0, 2, SAMPLES.shape, SAMPLES.tobytes())


def asked(*media: PromptMedia) -> GenerateRequest:
    """For the text of these recordings."""
    return GenerateRequest("r", "e", 0, b"", Sampling(9), media=media)


def test_the_encoder_gets_the_samples_and_the_decoder_the_tokens() -> None:
    """The name of the recording is its id."""
    prompt = speech_prompt([1, 3], asked(ITEM), SUPPORT)
    ((samples, rate_hz),) = prompt["encoder_prompt"]["multi_modal_data"]["audio"]
    assert (samples == SAMPLES).all()
    assert rate_hz == SUPPORT.rate_hz
    assert prompt["encoder_prompt"]["multi_modal_uuids"] == {"audio": ["id"]}
    assert prompt["decoder_prompt"] == {"prompt_token_ids": [1, 3]}


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ((), "0 recordings"),
        ((ITEM, ITEM), "2 recordings"),
        ((replace(ITEM, data=ITEM.data[1:]),), "4000 bytes came with 3999"),
        ((replace(ITEM, shape=(0,), data=b""),), "0 bytes came with 0"),
        ((replace(ITEM, shape=(1_001,), data=bytes(4_004)),), "longer than 1 s"),
    ],
)
def test_other_recordings_are_rejected(media: Any, message: str) -> None:
    """By name: the engine would end, or hear a part only."""
    with pytest.raises(RequestRejected, match=message) as raised:
        speech_prompt([1, 3], asked(*media), SUPPORT)
    assert raised.value.param == "file"


def test_a_worker_is_probed_with_silence() -> None:
    """Which is a recording as others are."""
    tokens, media = silence(SUPPORT)
    prompt = speech_prompt(list(tokens), asked(*media), SUPPORT)
    ((samples, _),) = prompt["encoder_prompt"]["multi_modal_data"]["audio"]
    assert len(samples) == 100
    assert not samples.any()
    assert tokens == (SUPPORT.start, SUPPORT.no_timestamps)
