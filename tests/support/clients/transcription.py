"""Whisper through a fleet: words that are spoken come back as text, in every format, through OpenAI's own client. What holds for every engine."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.request import MediaSource
from tests.support.engines import whisper
from tests.support.media.speech import spoken
from tests.support.processes.fleet import FleetProcess

MODEL = "whisper"
FLAGS = ("--served-model-name", MODEL, "--media-limits", "audio_seconds_max=60")
WORDS = "My name is Alice, and I live in London. Today is Monday, the third of July."
HEARD = "My name is Alice and I live in London. Today is Monday, the third of July."


async def check_spoken_words(up: FleetProcess) -> None:
    """Whole, streamed, and with times; chat is rejected by name, and so is what is no audio."""
    async with up.official_client() as client:
        file = ("said.wav", spoken(WORDS))

        async def ask(**more: Any) -> Any:
            return await client.audio.transcriptions.create(model=MODEL, **{"file": file, **more})

        whole = await ask()
        assert whole.text == HEARD
        assert whole.usage.seconds == 6
        events = [event async for event in await ask(stream=True, prompt="Alice said:", language="en")]
        assert "".join(event.delta for event in events[:-1]) == events[-1].text == HEARD
        timed = await ask(response_format="verbose_json")
        assert timed.text == HEARD
        assert timed.segments[0].start == 0.0
        assert timed.segments[-1].end == pytest.approx(timed.duration, abs=1.5)
        assert -1 < timed.segments[0].avg_logprob < 0
        with pytest.raises(openai.BadRequestError, match="no known type by its first bytes"):
            await ask(file=("said.wav", b"no audio at all, whatever its name says"))
        with pytest.raises(openai.BadRequestError, match="use /v1/audio/transcriptions"):
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}])


async def decoded(audio: bytes) -> "np.ndarray[Any, Any]":
    """The samples that workers get of a file."""
    intake = MediaIntake()
    try:
        return (await intake.fetch(MediaSource.from_bytes("audio", audio))).array()
    finally:
        await intake.close()


def likeliest_language(model: Path, samples: "np.ndarray[Any, Any]") -> str:
    """What the model takes these samples (float32, 16 kHz) for, by Hugging Face's implementation of it."""
    import torch
    from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

    network = WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    read: Any = WhisperFeatureExtractor.from_pretrained(model)
    vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    features = read(samples, sampling_rate=16_000, return_tensors="pt").input_features
    with torch.no_grad():
        start = torch.tensor([[whisper.START]])
        scores = network(input_features=features, decoder_input_ids=start).logits[0, -1]
    ids = range(whisper.START + 1, vocabulary["<|translate|>"])
    best = max(ids, key=lambda number: float(scores[number]))
    return str({number: name for name, number in vocabulary.items()}[best]).strip("<|>")


async def check_language(up: FleetProcess, model: Path) -> None:
    """As Hugging Face's implementation of the same weights detects it; what the client names is taken, and unknown ones are rejected."""
    said = spoken(WORDS)
    async with up.official_client() as client:
        file: Any = {"model": MODEL, "file": ("said.wav", said)}
        expected = await asyncio.to_thread(likeliest_language, model, await decoded(said))
        create: Any = client.audio.transcriptions.create
        verbose: Any = {"response_format": "verbose_json"}
        detected: Any = await create(**file, **verbose)
        assert detected.language == expected
        named: Any = await create(**file, **verbose, language=expected)
        assert (named.language, named.text) == (expected, detected.text)
        other: Any = await create(**file, **verbose, language="en" if expected != "en" else "de")
        assert other.language != expected
        events = [event async for event in await create(**file, stream=True)]
        assert events[-1].type == "transcript.text.done"
        translated: Any = await client.audio.translations.create(**file, **verbose)
        assert translated.language == expected
        with pytest.raises(openai.BadRequestError, match="does not know this language; it knows af, am,"):
            await create(**file, language="tlh")
