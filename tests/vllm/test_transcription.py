"""Whisper on real vLLM: words that are spoken come back as text, in every format, through OpenAI's own client."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.support.clients.transcription import FLAGS, MODEL, check_language, check_spoken_words
from tests.support.engines import whisper
from tests.support.media.speech import spoken
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

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


def flags(workers: int, folder: Path | None = None) -> tuple[str, ...]:
    """Of a fleet that transcribes. Small batches: vLLM encodes as many recordings as fit into one when it starts."""
    model = ("--engine", "vllm", "--model", str(folder or whisper.ensure()), *FLAGS)
    limits = ("--kv-cache-mib", "128")
    own = ("--", "--max-num-seqs", "2", "--max-num-batched-tokens", "1536")
    return (*model, *limits, "--workers", str(workers), *own)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transcriber(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """One worker."""
    async with fleet(tmp_path_factory.mktemp("whisper"), *flags(1), ready_s=240, vllm=True) as made:
        yield made


async def test_spoken_words_are_the_text(transcriber: FleetProcess) -> None:
    """Whole, streamed, and with times."""
    await check_spoken_words(transcriber)


async def test_the_language_is_detected(tmp_path: Path) -> None:
    """As the same weights do elsewhere."""
    model = await asyncio.to_thread(whisper.ensure_with_languages)
    async with fleet(tmp_path, *flags(1, model), ready_s=240, vllm=True) as made:
        await check_language(made, model)


@pytest.mark.soak
async def test_long_recordings_are_cut_where_nobody_speaks(transcriber: FleetProcess) -> None:
    """No word is lost or said twice; beyond the limit of seconds the recording is rejected."""
    async with openai.AsyncOpenAI(base_url=f"{transcriber.url}/v1", api_key="none", max_retries=0) as client:
        long = ("said.wav", spoken(" ".join(LONG)))
        answer = await client.audio.transcriptions.with_raw_response.create(
            model=MODEL, file=long, response_format="vtt"
        )
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.text.startswith("WEBVTT")
        assert [word for word in KEYWORDS if answer.text.count(word) != 1] == []
        with pytest.raises(openai.BadRequestError, match="longer than"):
            await client.audio.transcriptions.create(model=MODEL, file=("x.wav", spoken(" ".join(LONG * 2))))


@pytest.mark.soak
async def test_a_killed_worker_costs_no_word(tmp_path: Path) -> None:
    """Kill -9 while it transcribes: the other worker fetches the samples and continues."""
    async with (
        fleet(tmp_path, *flags(2), ready_s=240, vllm=True) as made,
        openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0) as client,
    ):
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
