"""The simulated engine's images: what they cost, when they are encoded, and that an answer depends on them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from headwater.engines.engine import EncodedImage, Engine, EngineUnavailable, RequestRejected, Step
from headwater.engines.sim import ZERO, StepTime
from headwater.engines.sim.cache import ImageStore, NoRoomForImage
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.engines.sim.model import SimEncoder, content_of, embedding_of, image_support
from headwater.schemas import hashing
from headwater.schemas.encode_requests import embedding_hashes
from headwater.schemas.hashing import unpack_hashes
from headwater.schemas.inference import GenerateRequest, Sampling
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import MediaSupport, count_image_tokens
from tests.support.worlds.clock import SkippingClock

SUPPORT = image_support()
SIDE = 140
TOKENS = 25
"""Of an image of 140 x 140 pixels."""
SETTINGS = SimSettings(
    media=MediaSupport(images=SUPPORT), reads_embeddings=True, script=tuple(range(300, 400)), step_time=ZERO
)
START = 10


def picture(value: int, start: int = START, *, pixels: bool = True) -> PromptMedia:
    """An image of one colour."""
    data = bytes([value]) * (SIDE * SIDE * 3)
    return PromptMedia("image", f"{value:032x}", start, TOKENS, (SIDE, SIDE, 3), data if pixels else b"")


def request(*media: PromptMedia, name: str = "r-0-0", tokens: int = 60, **more: Any) -> GenerateRequest:
    """A prompt with images."""
    prompt = [5] * tokens
    for item in media:
        prompt[item.start : item.start + item.tokens] = [SUPPORT.placeholder] * item.tokens
    return GenerateRequest(
        name, "", 0, hashing.pack_tokens(prompt), Sampling(max_tokens=4, temperature=0), media=media, **more
    )


@asynccontextmanager
async def running(settings: SimSettings = SETTINGS) -> AsyncIterator[tuple[SimEngine, SkippingClock]]:
    """A started engine and its clock."""
    clock = SkippingClock()
    engine = SimEngine(settings, clock)
    await engine.start()
    yield engine, clock
    await engine.stop()


async def answer(engine: Engine, asked: GenerateRequest) -> tuple[int, ...]:
    """The tokens of an answer."""
    steps: asyncio.Queue[Step] = asyncio.Queue()
    engine.submit(asked, steps.put_nowait)
    tokens: tuple[int, ...] = ()
    while True:
        step = await steps.get()
        tokens += step.tokens
        if step.finish:
            return tokens


def test_an_image_has_a_token_per_square() -> None:
    """Of 28 pixels, between 4 and 1,280."""
    sizes = ((140, 140), (28, 28), (1_008, 1_008), (4_000, 3_000))
    assert [count_image_tokens(SUPPORT, *size) for size in sizes] == [25, 4, 1_225, 1_230]


async def test_answers_depend_on_the_images_and_their_order() -> None:
    """Not on whether pixels came or an embedding, nor on the engine."""
    one, two = picture(1), picture(2)
    async with running() as (engine, _):
        text = await answer(engine, request(name="t-0-0"))
        first = await answer(engine, request(one, name="a-0-0"))
        other = await answer(engine, request(two, name="b-0-0"))
        assert len({text, first, other}) == 3
        second = msgspec.structs.replace(two, start=35)
        swapped = msgspec.structs.replace(one, start=35)
        both = await answer(engine, request(one, second, name="c-0-0"))
        assert both != await answer(engine, request(two, swapped, name="d-0-0"))
    async with running() as (engine, clock):
        encoder = SimEncoder(SETTINGS, clock)
        await encoder.start()
        for item in (one, two):
            await engine.put_embedding(item, await encoder.encode(item))
        bare = request(picture(1, pixels=False), picture(2, 35, pixels=False), name="e-0-0")
        assert await answer(engine, bare) == both
        wrong = await encoder.encode(one)
        await engine.put_embedding(picture(3), wrong)
        assert await answer(engine, request(picture(3, pixels=False), name="f-0-0")) == first, (
            "an embedding of another image shows"
        )


async def test_an_image_is_encoded_once_in_the_step_that_reaches_it() -> None:
    """Not again while its embedding is here, whoever computed it, nor where its KV is cached."""
    step_time = StepTime((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 1.0, 100.0))
    settings = SETTINGS._replace(step_time=step_time, step_tokens_max=16)
    async with running(settings) as (engine, clock):

        async def encoded(asked: GenerateRequest) -> list[float]:
            clock.slept.clear()
            await answer(engine, asked)
            return [seconds for seconds in clock.slept if seconds]

        cost = (100 + TOKENS) / 1000
        assert await encoded(request(picture(1), name="a-0-0")) == [cost], "once, though it spans three steps"
        assert await encoded(request(picture(1, 30), name="b-0-0")) == []
        assert await encoded(request(picture(2), picture(3, 35), name="c-0-0")) == [cost, cost]
        given = picture(4)
        await engine.put_embedding(given, EncodedImage(embedding_of(given), "float32"))
        assert await encoded(request(picture(4, pixels=False), name="d-0-0")) == []
    small = settings._replace(embedding_tokens=TOKENS)
    async with running(small) as (engine, clock):
        assert await encoded(request(picture(1), name="a-0-0")) == [cost]
        clock.now_s += 1_000
        assert await encoded(request(picture(2), name="b-0-0")) == [cost]
        assert await encoded(request(picture(1), name="c-0-0")) == [], "its KV is cached"


async def test_blocks_are_named_by_images_as_the_edge_names_them() -> None:
    """Also one that ends in generated tokens."""
    async with running(SETTINGS._replace(block_size=16)) as (engine, _):
        asked = request(picture(1), tokens=35 + 12)
        tokens = await answer(engine, asked)
        prompt = [*hashing.unpack_tokens(asked.tokens).tolist(), *tokens]
        digests = hashing.media_digests([(asked.media[0].id, START, TOKENS)], 16)
        named = hashing.sequence_hashes(
            hashing.unpack_tokens(hashing.pack_tokens(prompt[:48])), 16, multimodal=digests
        )
        held = [block for event in engine.cached_blocks() for block in unpack_hashes(event.hashes).tolist()]
        assert held == named.tolist()
        image_at_the_end = request(picture(2), tokens=START + TOKENS, name="e-0-0")
        tokens = await answer(
            engine, msgspec.structs.replace(image_at_the_end, sampling=Sampling(max_tokens=20))
        )
        prompt = [*hashing.unpack_tokens(image_at_the_end.tokens).tolist(), *tokens]
        digests = hashing.media_digests([(image_at_the_end.media[0].id, START, TOKENS)], 16)
        named = hashing.sequence_hashes(
            hashing.unpack_tokens(hashing.pack_tokens(prompt[:48])), 16, multimodal=digests
        )
        held = [block for event in engine.cached_blocks() for block in unpack_hashes(event.hashes).tolist()]
        assert set(named.tolist()) <= set(held)


async def test_what_would_end_a_real_engine_is_rejected() -> None:
    """No data and no embedding; half of the pixels; a placeholder without an image; a model without images."""
    async with running() as (engine, _):
        cases = (
            (request(picture(1, pixels=False)), "without its data"),
            (request(msgspec.structs.replace(picture(1), data=b"half")), "came with 4"),
            (msgspec.structs.replace(request(picture(1)), media=()), "without an image"),
        )
        for asked, message in cases:
            with pytest.raises(RequestRejected, match=message):
                engine.submit(asked, print)
    async with running(SETTINGS._replace(media=MediaSupport())) as (engine, clock):
        with pytest.raises(RequestRejected, match="images"):
            engine.submit(request(picture(1)), print)
        with pytest.raises(EngineUnavailable, match="takes no images"):
            await SimEncoder(SETTINGS._replace(media=MediaSupport()), clock).start()
    async with running(SETTINGS._replace(reads_embeddings=False)) as (engine, _):
        with pytest.raises(RequestRejected, match="image_embeddings"):
            await engine.put_embedding(picture(1), EncodedImage(embedding_of(picture(1)), "float32"))


async def test_an_encode_worker_computes_each_image_once() -> None:
    """One after the other; what it keeps is announced as blocks."""
    clock = SkippingClock()
    encoder = SimEncoder(SETTINGS._replace(step_time=StepTime(), embedding_tokens=64), clock)
    await encoder.start()
    found = await asyncio.gather(*(encoder.encode(picture(value)) for value in (1, 1, 2)))
    assert [image.cached for image in found] == [False, True, False]
    assert clock.slept == [StepTime().encode_seconds([TOKENS])] * 2
    assert np.array_equal(found[0].values, embedding_of(picture(1)))
    assert content_of(found[0].values) != content_of(found[2].values)
    blocks = [embedding_hashes(picture(value), SETTINGS.block_size).tobytes() for value in (1, 2)]
    await asyncio.sleep(0)
    assert [event.hashes for event in encoder.held_blocks()] == blocks
    assert encoder.load().used_blocks == 4
    await encoder.encode(picture(3))
    await asyncio.sleep(0)
    assert not encoder.holds_embedding(picture(1))
    with pytest.raises(RequestRejected, match="this encode worker takes no recordings"):
        await encoder.encode(PromptMedia("recording", "r", 0, 1, (10,), bytes(40)))
    await encoder.stop()


async def test_an_embedding_stays_as_long_as_a_request_may_need_it() -> None:
    """Without room it is an error at once, for which the worker fetches the pixels."""
    now = [0.0]
    store = ImageStore(100, lambda: now[0], linger_s=60)
    assert store.keep("a", 60, 1)
    assert not store.keep("b", 60, 2)
    now[0] = 61
    assert store.keep("b", 60, 2)
    assert (store.content("a"), store.content("b"), store.tokens) == (None, 2, 60)
    async with running(SETTINGS._replace(embedding_tokens=TOKENS)) as (engine, _):
        await engine.put_embedding(picture(1), EncodedImage(embedding_of(picture(1)), "float32"))
        with pytest.raises(NoRoomForImage):
            await engine.put_embedding(picture(2), EncodedImage(embedding_of(picture(2)), "float32"))
        assert engine.holds_embedding(picture(1))
        assert not engine.holds_embedding(picture(2))
