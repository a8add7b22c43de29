"""Whisper on the real SGLang: the same words as with vLLM."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tests.support.clients.transcription import FLAGS, HEARD, MODEL, WORDS, check_language, check_spoken_words
from tests.support.engines import whisper
from tests.support.media.speech import spoken
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.xdist_group("sglang"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]


def flags(model: Path) -> tuple[str, ...]:
    """Of a fleet that transcribes."""
    return ("--engine", "sglang", "--model", str(model), *FLAGS, "--workers", "1")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transcriber(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """One worker."""
    folder = tmp_path_factory.mktemp("whisper")
    async with fleet(folder, *flags(whisper.ensure()), ready_s=240, sglang=True) as made:
        yield made


async def test_spoken_words_are_the_text(transcriber: FleetProcess) -> None:
    """Whole, streamed, and with times."""
    await check_spoken_words(transcriber)


async def test_recordings_at_once_are_not_mixed_up(transcriber: FleetProcess) -> None:
    """SGLang gives each the same places in its cache: nothing of one may be found for another."""
    parts = [part.strip() + "." for part in WORDS.split(".") if part.strip()]
    heard = [part.strip() + "." for part in HEARD.split(".") if part.strip()]
    async with openai.AsyncOpenAI(base_url=f"{transcriber.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(words: str) -> str:
            answer = await client.audio.transcriptions.create(model=MODEL, file=("said.wav", spoken(words)))
            return str(answer.text).strip()

        found = await asyncio.gather(*(ask(words) for words in parts * 3))
    assert found == heard * 3


@pytest.mark.soak
async def test_the_language_is_detected(tmp_path: Path) -> None:
    """As the same weights do elsewhere."""
    model = await asyncio.to_thread(whisper.ensure_with_languages)
    async with fleet(tmp_path, *flags(model), ready_s=240, sglang=True) as made:
        await check_language(made, model)
