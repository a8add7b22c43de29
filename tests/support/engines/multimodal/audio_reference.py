"""What Hugging Face's implementation of the tiny model that hears answers: independent of every engine and of the edge's prompts."""

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.support.engines.multimodal import tiny_audio_model

BEFORE: Final = (100, 101, 102)
AFTER: Final = (110, 111, 112)
ANSWERS: Final[dict[float, Sequence[int]]] = {
    2.0: (1337, 2701, 3072, 1792, 3413, 2069, 2720, 2222),
    30.0: (2594, 3827, 3053, 1800, 905, 283, 2594, 2796),
}
"""The greedy tokens after `prompt` about `noise`, by the clip's seconds. That these are Hugging Face's is tested with vLLM's packages."""

RUN: Final = "from tests.support.engines.multimodal.audio_reference import main; main()"


def noise(seconds: float) -> NDArray[np.float32]:
    """A clip, always the same."""
    samples = round(seconds * tiny_audio_model.RATE_HZ)
    return (np.random.default_rng(3).standard_normal(samples) * 0.3).astype(np.float32)


def prompt(placeholder: int, tokens: int) -> list[int]:
    """A prompt with a clip of so many tokens, between the tokens that begin and end one: their ids are next to the placeholder's."""
    return [*BEFORE, placeholder - 1, *[placeholder] * tokens, placeholder + 1, *AFTER]


def main() -> None:
    """Print what Hugging Face's implementation answers about each clip, as JSON."""
    import torch
    from transformers import Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

    torch.set_num_threads(1)
    folder = str(tiny_audio_model.ensure())
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder).eval()

    def answer(seconds: float) -> list[int]:
        features: Any = extractor(
            noise(seconds),
            sampling_rate=tiny_audio_model.RATE_HZ,
            return_attention_mask=True,
            return_tensors="pt",
        )
        count = (round(seconds * tiny_audio_model.RATE_HZ) + 319) // tiny_audio_model.SAMPLES_PER_TOKEN
        tokens = torch.tensor([prompt(model.config.audio_token_id, count)])
        found = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            input_features=features.input_features,
            feature_attention_mask=features.attention_mask,
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [int(token) for token in found[0, tokens.shape[1] :]]

    print(json.dumps([answer(seconds) for seconds in ANSWERS]))
