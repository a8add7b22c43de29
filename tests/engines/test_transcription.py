"""Whisper on real engines: words that are spoken come back as text, in every format, through OpenAI's own client."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.engines.cases import SGLANG, VLLM, VLLM_IN_EVERY_RUN, Case, only
from tests.support.clients.transcription import FLAGS, HEARD, MODEL, WORDS, check_language, check_spoken_words
from tests.support.engines import whisper
from tests.support.media.speech import spoken
from tests.support.processes.fleet import FleetProcess

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

LONG = (
    "In January it snows, and children build a house of snow.",
    "In March the first flowers open in the garden.",
    "A farmer sells apples and bread at the market.",
    "The train to Paris leaves at nine in the morning.",
    "My brother plays the piano every evening.",
    "Seven ships sailed across the ocean.",
    "The doctor asked the nurse for water.",
    "Our teacher reads a book about the moon.",
    "The river flows under a bridge of stone.",
    "Tomorrow we go to the mountains by car.",
    "The cat sleeps on the kitchen table.",
    "In winter the lake is frozen.",
)
"""36 seconds."""
KEYWORDS = (
    "January",
    "March",
    "apples",
    "Paris",
    "piano",
    "ocean",
    "doctor",
    "teacher",
    "bridge",
    "mountains",
    "kitchen",
    "winter",
)


OWN = {
    "vllm": (
        "--native=--kv-cache-memory-bytes=134217728",
        "--",
        "--max-num-seqs",
        "2",
        "--max-num-batched-tokens",
        "1536",
    ),
    "sglang": (),
}
"""An engine's own flags. Small batches: vLLM encodes as many recordings as fit into one when it starts."""


def flags(case: Case, workers: int, folder: Path | None = None) -> tuple[str, ...]:
    """Of a fleet that transcribes."""
    model = ("--model", str(folder or whisper.ensure()), *FLAGS)
    return (*model, "--workers", str(workers), *OWN[case.engine])


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def transcriber(case: Case, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """One worker."""
    async with case.fleet(tmp_path_factory.mktemp("whisper"), *flags(case, 1)) as made:
        yield made


@VLLM_IN_EVERY_RUN
async def test_spoken_words_are_the_text(transcriber: FleetProcess) -> None:
    """Whole, streamed, and with times."""
    await check_spoken_words(transcriber)


@only(SGLANG, pytest.mark.soak)
async def test_recordings_at_once_are_not_mixed_up(transcriber: FleetProcess) -> None:
    """SGLang gives each the same places in its cache: nothing of one may be found for another."""
    parts = [part.strip() + "." for part in WORDS.split(".") if part.strip()]
    heard = [part.strip() + "." for part in HEARD.split(".") if part.strip()]
    async with transcriber.official_client() as client:

        async def ask(words: str) -> str:
            answer = await client.audio.transcriptions.create(model=MODEL, file=("said.wav", spoken(words)))
            return str(answer.text).strip()

        found = await asyncio.gather(*(ask(words) for words in parts * 3))
    assert found == heard * 3


@pytest.mark.soak
async def test_the_language_is_detected(case: Case, tmp_path: Path) -> None:
    """As the same weights do elsewhere."""
    model = await asyncio.to_thread(whisper.ensure_with_languages)
    async with case.fleet(tmp_path, *flags(case, 1, model)) as made:
        await check_language(made, model)


@only(VLLM, pytest.mark.soak)
async def test_long_recordings_are_cut_where_nobody_speaks(transcriber: FleetProcess) -> None:
    """No word is lost or said twice; beyond the limit of seconds the recording is rejected."""
    async with transcriber.official_client() as client:
        long = ("said.wav", spoken(" ".join(LONG)))
        answer = await client.audio.transcriptions.with_raw_response.create(
            model=MODEL, file=long, response_format="vtt"
        )
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.text.startswith("WEBVTT")
        assert [word for word in KEYWORDS if answer.text.count(word) != 1] == []
        with pytest.raises(openai.BadRequestError, match="longer than"):
            await client.audio.transcriptions.create(model=MODEL, file=("x.wav", spoken(" ".join(LONG * 2))))


@only(VLLM, pytest.mark.soak)
async def test_a_killed_worker_costs_no_word(case: Case, tmp_path: Path) -> None:
    """Kill -9 while it transcribes: the other worker fetches the samples and continues."""
    async with case.fleet(tmp_path, *flags(case, 2)) as made, made.official_client() as client:
        await made.until_whole()

        async def listen() -> AsyncIterator[Any]:
            file = ("said.wav", spoken(" ".join(LONG)))
            async for event in await client.audio.transcriptions.create(model=MODEL, file=file, stream=True):
                yield event

        expected = [event async for event in listen()][-1].text
        deltas: list[str] = []
        killing: asyncio.Task[int] | None = None
        async for event in listen():
            if event.type == "transcript.text.delta":
                deltas.append(event.delta)
                killing = killing or asyncio.create_task(_kill_a_busy_worker(made))
        assert killing is not None
        await killing
        assert "".join(deltas) == event.text == expected


async def _kill_a_busy_worker(made: FleetProcess) -> int:
    stats = await made.until("it runs", lambda stats: any(one.get("running") for one in stats))
    return await made.kill_worker(next(one["id"] for one in stats if one.get("running")))
