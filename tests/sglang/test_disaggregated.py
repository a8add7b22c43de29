"""Encode, prefill and decode apart with real SGLang and real NIXL: legs that meet in rooms answer as one engine does."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import pytest_asyncio

from tests.sglang.saga_kills import kill_in_every_state, pause_during_handoff
from tests.support.clients.encoding import encode_legs, until_it_encodes
from tests.support.clients.media_chat import ask
from tests.support.clients.pictures import picture_url
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.engines.multimodal.vision_reference import reference_answers
from tests.support.media.images import data_url
from tests.support.media.recordings import film
from tests.support.processes.disaggregated import (
    ANSWER_TOKENS,
    REFUSALS,
    Tokens,
    answers,
    body,
    handed_over,
    refused_references,
    under_kills,
)
from tests.support.processes.encode_leg import Kill, check_kill, killed_in_state, kills
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.xdist_group("sglang"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

PROMPTS = 16
PROMPTS_OF_SOAK = 200
KILLS = ((25, "prefill-0"), (60, "decode-0"), (100, " router "), (140, "prefill-0"))
READY_S = 300
COMMON = ("--served-model-name", "tiny", "--max-model-len", "1024")


def flags(*more: str) -> tuple[str, ...]:
    """A fleet of SGLang workers with a model that takes images."""
    return ("--engine", "sglang", "--model", str(tiny_vision_model.ensure()), *COMMON, *more)


def films() -> list[tuple[str, ...]]:
    """Questions about a video, about two, and about one next to an image."""
    first, second = (data_url(film(frames, size=(112, 112), first=frames), "video/mp4") for frames in (8, 5))
    return [
        (first, "What happens?"),
        (second, " and ", first, ": which is longer?"),
        (picture_url(43), second, "Which was first?"),
    ]


class Aggregated(NamedTuple):
    """What a worker that does everything answers: to prompts, and about `films`."""

    tokens: list[Tokens]
    films: list[str]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def aggregated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Aggregated:
    """By one fleet, which has ended."""
    soak = any(item.get_closest_marker("soak") for item in request.session.items)
    async with fleet(
        tmp_path_factory.mktemp("together"), *flags("--workers", "1"), ready_s=READY_S, sglang=True
    ) as up:
        return Aggregated(
            await answers(up, PROMPTS_OF_SOAK if soak else PROMPTS),
            [await ask_alone(up, *question) for question in films()],
        )


@pytest.fixture(scope="module")
def together(aggregated: Aggregated) -> list[Tokens]:
    """What a worker that does everything answers to prompts."""
    return aggregated.tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart(
    together: list[Tokens], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[FleetProcess]:
    """One worker for each of the three. After `together`, which it would delay while it starts."""
    split = flags(
        "--prefill-workers", "1", "--decode-workers", "1", "--encode-workers", "1", "--encode-legs", "always"
    )
    async with fleet(tmp_path_factory.mktemp("apart"), *split, ready_s=READY_S, sglang=True) as up:
        yield up


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def first(apart: FleetProcess) -> tuple[list[Tokens], int]:
    """What the new fleet answers, and how many prompts it handed over to do so."""
    return await answers(apart, PROMPTS), await handed_over(apart)


async def test_prompts_have_the_same_tokens(first: tuple[list[Tokens], int], together: list[Tokens]) -> None:
    """No two are alike, and the beginning of a prompt matters, so another's KV would show. All are handed over."""
    assert len(set(together)) == len(together)
    assert all(len(one) == ANSWER_TOKENS for one in together)
    found, legs = first
    assert found == together[:PROMPTS]
    assert legs >= PROMPTS


async def test_tokens_are_the_same_while_clients_leave(apart: FleetProcess, together: list[Tokens]) -> None:
    """Every tenth leaves, some before their first token: neither leg is in the way of the others."""
    assert await under_kills(apart, together[:PROMPTS], ()) == []


@pytest.mark.soak
async def test_two_hundred_prompts_have_the_same_tokens(apart: FleetProcess, together: list[Tokens]) -> None:
    """The same with more of them, undisturbed and under kills and cancellations."""
    assert await answers(apart, PROMPTS_OF_SOAK) == together
    assert await under_kills(apart, together, KILLS) == []


@pytest.mark.soak
async def test_a_kill_in_any_state_costs_no_answer(apart: FleetProcess) -> None:
    """Of the prefill worker, the decode worker and the router; tests/sim has the same table for every choreography."""
    rows = await kill_in_every_state(apart, 100)
    assert [row for row in rows if row[2]] == []


@pytest.mark.soak
@pytest.mark.timeout(1_800)
async def test_a_worker_that_is_stopped_for_longer_than_its_lease_costs_no_answer(
    apart: FleetProcess,
) -> None:
    """In the middle of a hand-off: its request moves, and what it sends or holds when it goes on is of no consequence."""
    rows = await pause_during_handoff(apart, 120)
    assert [row for row in rows if row[2]] == []


async def test_usage_counts_what_the_prefill_engine_had_cached(apart: FleetProcess) -> None:
    """Whole pages of a prompt that was asked before, but for its last token's; a transfer is no hit."""
    asked = body(0) | {"prompt": [1_000 + number for number in range(100)]}
    told = []
    async with apart.client() as client:
        for _ in range(2):
            usage = (await client.post("/v1/completions", json=asked)).json()["usage"]
            told.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert told == [0, 96]


async def test_images_are_encoded_and_handed_over(apart: FleetProcess, tmp_path: Path) -> None:
    """The encode worker computes the embeddings, the prefill engine the KV of an image's tokens, of the right one, and the decode
    engine goes on with it."""
    questions = ((picture_url(41), "What is this?"), (picture_url(42), "What is this?"))
    expected = await reference_answers(tmp_path, *questions)
    assert expected[0] != expected[1]
    await until_it_encodes(apart)
    before, legs = await handed_over(apart), await encode_legs(apart)
    async with openai.AsyncOpenAI(base_url=f"{apart.url}/v1", api_key="none", max_retries=0) as client:
        answers = [await ask(client, *question) for question in (*questions, questions[0])]
    assert [one.text for one in answers] == [*expected, expected[0]]
    assert [one.cached for one in answers] == [0, 0, 64]
    assert await handed_over(apart) == before + 3
    legs = await encode_legs(apart) - legs
    # On a machine that stalls, the serving worker may be expected to be faster.
    assert legs["computed"], legs
    assert not legs["failed"]


async def test_videos_are_encoded_and_handed_over(apart: FleetProcess, aggregated: Aggregated) -> None:
    """As images are, also several in a request, and next to one."""
    await until_it_encodes(apart)
    legs = await encode_legs(apart)
    assert [await ask_alone(apart, *question) for question in films()] == aggregated.films
    assert len(set(aggregated.films)) == len(films())
    legs = await encode_legs(apart) - legs
    # The embeddings of the first video and of the second are used again.
    assert (legs["computed"], legs["failed"]) == (3, 0), legs


async def test_an_encode_worker_that_is_killed_costs_no_answer(apart: FleetProcess, tmp_path: Path) -> None:
    """While the prefill worker waits for the embedding that it has claimed: that one encodes instead."""
    question = (picture_url(50), "What is this?")
    expected = await reference_answers(tmp_path, question)
    await apart.until_whole(3)
    # The first image takes seconds on a busy machine: longer than the lease of the worker that is stopped meanwhile.
    await ask_alone(apart, picture_url(49), "What is this?")
    found = await killed_in_state(apart, "claimed", "encode-0", "prefill-0", ask_alone(apart, *question))
    assert [found] == expected
    assert '"embedding_not_read"' in apart.log.read_text()
    await until_it_encodes(apart)


@pytest.mark.soak
@pytest.mark.parametrize("kill", kills("asked", "dispatched", "claimed", "decode"))
async def test_a_kill_in_any_state_of_an_image_costs_no_answer(apart: FleetProcess, kill: Kill) -> None:
    """Of each worker, the router and the edge: one right answer, or for the edge's client a broken connection.

    Its encoder computes in the worker's own process, so the state in which it computes cannot be held.
    """

    async def asked(number: int, length: int, **more: Any) -> str:
        question = (picture_url(100 + number), "What is this?")
        return await ask_alone(apart, *question, max_tokens=length, **more)

    # The same words with another image have another answer, and this one's KV is in a cache of its own.
    await check_kill(apart, kill, asked, partial(asked, cache_salt="undisturbed"))


async def ask_alone(up: FleetProcess, *question: str, **more: Any) -> str:
    """The answer by a client of its own. Raises `httpx.TransportError` where the connection breaks.

    While its only prefill or decode worker starts again, a fleet of SGLang serves nothing: by a 503 the client is sent away for some seconds.
    """
    async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0) as client:
        while True:
            try:
                return str((await ask(client, *question, **more)).text)
            except openai.APIConnectionError as error:
                raise httpx.TransportError(str(error)) from error
            except openai.InternalServerError as error:
                if error.status_code != 503 or "retry-after" not in error.response.headers:
                    raise
                await asyncio.sleep(float(error.response.headers["retry-after"]))


async def test_references_that_are_not_good_are_refused(apart: FleetProcess, together: list[Tokens]) -> None:
    """Used, stale, unknown, another life's, another prompt's: an error each, and never another prompt's answer."""
    assert await refused_references(apart) == REFUSALS
    assert await answers(apart, 10) == together[:10]
