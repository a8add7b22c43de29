"""Images, videos, audio and an encode worker with the simulated engine, as `headwater up` starts them without a GPU."""

import base64
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import httpx
import numpy as np
import openai
import pytest

from headwater.engines.sim.model import embedding_of
from headwater.schemas.media import PromptMedia
from tests.support.clients.media_chat import MediaAnswer, content
from tests.support.clients.pictures import HEIGHT, WIDTH, picture_url
from tests.support.clients.sim_images import ANSWER_TOKENS, SEED, TOKENS, expected, question
from tests.support.media.documents import pdf
from tests.support.media.embeddings import embedding_file, embedding_part
from tests.support.media.images import data_url
from tests.support.media.recordings import film, recording, tone, wav
from tests.support.processes.fleet import FleetProcess, shared_fleet

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


QUESTION: Final = "What is this?"


up = shared_fleet(
    *("--engine", "sim", "--workers", "1", "--encode-workers", "1", "--sim-step-time", "zero"),
    *("--encode-legs", "always", "--accept-image-embeds"),
)
"""A worker and an encode worker, which the edge always uses: what the estimate says depends on the machine's load."""


async def ask(client: httpx.AsyncClient, *seeds: int, before: str) -> tuple[str, str]:
    """An answer about pictures after some words, and the request's id."""
    reply = await client.post("/v1/chat/completions", json=question(*seeds, before=before))
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"], reply.headers["x-request-id"]


async def legs(client: httpx.AsyncClient) -> Counter[str]:
    """Images that the edge sent to encode workers so far, by outcome."""
    page = (await client.get("/metrics")).text
    found = re.findall(r'^headwater_edge_encode_legs_total{outcome="(\w+)"} ([0-9.]+)', page, re.M)
    return Counter({outcome: int(float(count)) for outcome, count in found})


async def test_answers_are_of_the_images_with_and_without_an_encode_worker(up: FleetProcess) -> None:
    """Encoded once and kept; of two images in their order; and by the worker itself once the encode worker is gone."""
    await up.until_whole()
    async with up.client() as client:
        before = await legs(client)
        assert (await ask(client, 1, before="one"))[0] == expected(1)
        assert (await ask(client, 2, 1, before="two"))[0] == expected(2, 1) != expected(1, 2)
        assert await legs(client) - before == Counter(computed=2, cached=1)
        text, request = await ask(client, 1, before="three")
        assert text == expected(1)
        code, shown = await up.command("explain", request)
        assert code == 0, shown
        assert "64 tokens of an image's embedding in 4 full blocks" in shown
        assert re.search(r"56 tokens: encode-0\.\d+ had its embedding, after [0-9.]+ ms", shown), shown
        assert "the edge always uses encode workers (--encode-legs)" in shown
        assert re.search(r"; image [0-9a-f]{32} \(56 tokens from \d+ on\)$", shown, re.M), shown
        await up.kill_worker("encode-0")
        for seed in (1, 3):
            assert (await ask(client, seed, before="without"))[0] == expected(seed)


@asynccontextmanager
async def clients(up: FleetProcess) -> AsyncIterator[tuple[httpx.AsyncClient, openai.AsyncOpenAI]]:
    """A plain client of the fleet, and OpenAI's own."""
    async with (
        up.client() as plain,
        openai.AsyncOpenAI(base_url=str(plain.base_url.join("/v1")), api_key="none", max_retries=0) as client,
    ):
        yield plain, client


async def ask_official(client: openai.AsyncOpenAI, *parts: Any, **more: Any) -> MediaAnswer:
    """An answer about some parts; `more` are arguments of the client."""
    messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    fields: dict[str, Any] = {"model": "sim", "max_tokens": 12, "seed": SEED, "messages": messages}
    return MediaAnswer(await client.chat.completions.with_raw_response.create(**fields, **more))


async def explained(up: FleetProcess, answer: MediaAnswer) -> str:
    """What `headwater explain` says of an answer."""
    code, shown = await up.command("explain", answer.request)
    assert code == 0, shown
    return shown


def heard(sound: bytes, form: str) -> dict[str, Any]:
    """A part with a sound."""
    data = base64.b64encode(sound).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}}


def seen(first: int) -> dict[str, Any]:
    """A part with a video that begins with picture `first`."""
    url = data_url(film(20, size=(112, 112), first=first), "video/mp4")
    return {"type": "video_url", "video_url": {"url": url}}


async def test_official_clients_send_audio(up: FleetProcess) -> None:
    """As their documentation does: its tokens are the rule's, equal content is cached, and encode workers encode it.

    The same tone as WAV and FLAC is one item; another one is not.
    """
    await up.until_whole()
    part = heard(wav(tone(2.0, 16_000), 16_000), "wav")
    async with clients(up) as (plain, client):
        before = await legs(plain)
        words = (await ask_official(client)).tokens
        sound = await ask_official(client, part)
        assert (sound.tokens, sound.cached, sound.audio) == (words + 50, 0, 50)
        same = await ask_official(client, heard(recording("flac", "flac", 2.0, 16_000), "flac"))
        other = await ask_official(client, heard(recording("mp3", "libmp3lame", 2.0, 16_000), "mp3"))
        # The words before it are less than a block of 16; the one with the end of the sound has what follows, too.
        assert same.cached == (words + 50) // 16 * 16
        assert same.text == sound.text != other.text
        assert (other.tokens, other.cached) == (words + 50, 0)
        sent = await legs(plain) - before
        assert sent["computed"] + sent["cached"] == sent.total() >= 2
        assert sent["computed"]
        assert "64 tokens of an audio clip's embedding in 4 full blocks" in await explained(up, sound)
        spoken: Any = [{"role": "user", "content": [part]}]
        response = await client.responses.create(model="sim", max_output_tokens=2, input=spoken)
        assert response.usage is not None
        assert response.usage.input_tokens == sound.tokens - len(QUESTION)


async def test_official_clients_send_videos(up: FleetProcess) -> None:
    """As their documentation does: their tokens are the rule's, equal content at the same place is cached, and encode workers encode them."""
    await up.until_whole()
    picture = {"type": "image_url", "image_url": {"url": picture_url(7)}}
    async with clients(up) as (plain, client):
        ask = partial(ask_official, client)
        before = await legs(plain)
        words = (await ask()).tokens
        video = await ask(seen(0), picture)
        # 16 of 20 frames, two of which have 16 tokens.
        assert (video.tokens, video.cached, video.audio) == (words + 8 * 16 + TOKENS, 0, None)
        shown = await explained(up, video)
        places = rf"; video [0-9a-f]{{32}} \(128 tokens from (\d+) on\), image [0-9a-f]{{32}} \({TOKENS} tokens from (\d+) on\)"
        starts = re.search(places + "$", shown, re.M)
        assert starts is not None, shown
        assert "128 tokens of a video's embedding in 8 full blocks" in shown
        assert int(starts[2]) == int(starts[1]) + 128
        assert (await ask(seen(0), picture)).cached == video.tokens // 16 * 16
        assert (await ask(seen(9), picture)).cached == 0
        assert (await ask(picture, seen(0))).cached == 0
        assert (await ask(seen(0), picture, extra_body={"cache_salt": "another tenant"})).cached == 0
        sent = await legs(plain) - before
        # Two videos and a picture, and again for another place and another tenant, whose embeddings are held.
        assert sent["computed"] + sent["cached"] == sent.total() >= 6
        assert sent["computed"]


async def test_official_clients_are_told_which_videos_are_refused(up: FleetProcess) -> None:
    """Too many of them, and those that the responses API does not have."""
    async with clients(up) as (_, client):
        with pytest.raises(openai.BadRequestError, match="sim takes at most 4 in a request") as raised:
            await ask_official(client, *[seen(0)] * 5)
        assert raised.value.code == "too_many_videos"
        video_part: Any = {"type": "input_video", "video_url": "data:video/mp4;base64,AAAA"}
        with pytest.raises(openai.BadRequestError, match="'input_video' is not supported") as raised:
            await client.responses.create(model="sim", input=[{"role": "user", "content": [video_part]}])
        assert raised.value.param == "input[0].content[0].type"


async def test_official_clients_send_files_of_which_the_model_sees_the_text(up: FleetProcess) -> None:
    """As their documentation does: a prompt is as long as with the text written out; an unknown file is the client's error."""
    data = base64.b64encode(pdf(["Buy milk."])).decode()
    url = f"data:application/pdf;base64,{data}"
    written = "[File: a.pdf]\nBuy milk.\n[End of file: a.pdf]\n"
    given: Any = {"type": "file", "file": {"filename": "a.pdf", "file_data": url}}
    part: Any = {"type": "input_file", "filename": "a.pdf", "file_data": url}
    source: Any = {"type": "base64", "media_type": "application/pdf", "data": data}
    block: Any = {"type": "document", "title": "a.pdf", "source": source}
    # Two seconds of CPU, which each worker that collects this file would need.
    import anthropic

    async with (
        up.client() as plain,
        openai.AsyncOpenAI(base_url=str(plain.base_url.join("/v1")), api_key="none", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=str(plain.base_url), api_key="none", max_retries=0) as other,
    ):

        async def chat(content: Any) -> int:
            messages: Any = [{"role": "user", "content": content}]
            answer = await client.chat.completions.create(model="sim", max_tokens=2, messages=messages)
            assert answer.usage is not None
            return int(answer.usage.prompt_tokens)

        response = await client.responses.create(
            model="sim", max_output_tokens=2, input=[{"role": "user", "content": [part]}]
        )
        assert response.usage is not None
        message = await other.messages.create(
            model="sim", max_tokens=2, messages=[{"role": "user", "content": [block]}]
        )
        expected = await chat(written)
        assert expected > await chat("") + 10
        cached = (message.usage.cache_read_input_tokens or 0) + (
            message.usage.cache_creation_input_tokens or 0
        )
        counts = (await chat([given]), response.usage.input_tokens, message.usage.input_tokens + cached)
        assert counts == (expected,) * 3
        given["file"]["file_data"] = base64.b64encode(b"PK\3\4\0").decode()
        with pytest.raises(openai.BadRequestError, match="Convert it to one of these") as raised:
            await chat([given])
        assert (raised.value.code, raised.value.param) == (
            "media_unknown_type",
            "messages[0].content[0].file.file_data",
        )


async def test_an_embedding_answers_as_its_image_does(up: FleetProcess) -> None:
    """Sent in place of the image, also a second time, when it is on the worker; another image's gives another answer; and errors are named."""
    shape = (HEIGHT, WIDTH, 3)
    pixels = np.random.default_rng(7).integers(0, 255, shape, dtype=np.uint8).tobytes()
    values = embedding_of(PromptMedia("image", "0" * 32, 0, TOKENS, shape, pixels))
    fields = {"model": "sim", "seed": SEED, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}

    async with up.client() as client:

        async def answer(file: bytes, before: str) -> httpx.Response:
            parts = [{"type": "text", "text": before}, embedding_part(file)]
            return await client.post(
                "/v1/chat/completions", json={**fields, "messages": [{"role": "user", "content": parts}]}
            )

        good = embedding_file(values, (1, 7, 8))
        for before in ("first", "again", "again"):
            reply = await answer(good, before)
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["message"]["content"] == expected(7)
        other = await answer(embedding_file(values + 1, (1, 7, 8)), "first")
        assert other.json()["choices"][0]["message"]["content"] != expected(7)
        for bad, code in (
            (embedding_file(values, (1, 7, 7)), "image_shape"),
            (embedding_file(values * np.nan, (1, 7, 8)), "media_bad_embedding"),
            (b"\x80\x04cos\nsystem\n(S'id'\ntR.", "media_unknown_type"),
        ):
            reply = await answer(bad, "first")
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)
            assert reply.json()["error"]["param"] == "messages[0].content[1].image_embeds"


async def test_vectors_are_of_the_images(up: FleetProcess) -> None:
    """Of a conversation: the same picture in another file is the same vector; another one, and none, are others."""

    def turn(*parts: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": content(*parts)}]

    one, again, other = picture_url(41), picture_url(41, "PNG", compress_level=1), picture_url(42)
    conversations = [turn(one, "a"), turn(again, "a"), turn(other, "a"), turn("a", one), turn("a")]
    async with up.client() as client:
        body = {"model": "sim", "messages": conversations}
        answer = await client.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        vectors = [tuple(entry["embedding"]) for entry in answer.json()["data"]]
    assert vectors[0] == vectors[1]
    assert len(set(vectors)) == len(vectors) - 1
