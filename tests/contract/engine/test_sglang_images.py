"""Images on the real SGLang without a fleet: what is reused, and prompts that no edge sends."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace

from headwater.engines.conformance.case import Answer
from headwater.engines.engine import RequestRejected
from headwater.schemas import hashing
from headwater.schemas.messages.media import PromptMedia
from tests.support.engines import tiny_vision_model
from tests.support.ports.engines import EngineCase, sglang_engine, started
from tests.support.ports.waiting import eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.sglang,
    pytest.mark.filterwarnings("ignore"),
]

HEIGHT, WIDTH, TOKENS = 196, 224, 56


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(sglang_model: str) -> AsyncIterator[EngineCase]:
    """An engine with the tiny model that takes images."""
    engine = sglang_engine(
        str(tiny_vision_model.ensure()), max_model_len=1024, overrides={"skip_tokenizer_init": False}
    )
    async with started(engine) as made:
        yield made


def image(start: int, seed: int = 1, id_: str = "") -> PromptMedia:
    """An image with noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    return PromptMedia(
        "image", id_ or f"{seed:032x}"[::-1], start, TOKENS, (HEIGHT, WIDTH, 3), pixels.tobytes()
    )


def spanned(case: EngineCase, images: int = 1) -> list[int]:
    """The tokens of images next to each other, within those of a beginning and an end."""
    assert case.info.images is not None
    # Their ids follow each other.
    pad = case.info.images.placeholder
    begin, end = pad - 2, pad - 1
    return [begin, *[pad] * TOKENS * images, end]


async def answer(case: EngineCase, prompt: list[int], *media: PromptMedia) -> Answer:
    """One request from begin to end."""
    found = await case.submit(replace(case.request(prompt), media=media)).ended()
    await case.idle()
    return found


async def test_an_image_is_known_by_its_id(case: EngineCase) -> None:
    """Its blocks have the names that an edge computes. The id decides, not the pixels: those of another id are never reused."""
    before, after = case.prompt(0.5), case.prompt(1)
    prompt = [*before, *spanned(case), *after]
    place = image(len(before) + 1)
    first = await answer(case, prompt, place)
    assert first.cached_tokens == 0
    size = case.info.block_size
    digests = hashing.media_digests([(place.id, place.start, TOKENS)], size)
    names = hashing.sequence_hashes(np.array(prompt, np.uint32), size, multimodal=digests)
    assert len(names) == 3
    await eventually(lambda: case.kv.holds(names))
    again = await answer(case, prompt, place)
    assert again.cached_tokens == 3 * size
    assert again.tokens == first.tokens
    same_pixels = await answer(case, prompt, image(place.start, 1, "b" * 32))
    assert same_pixels.cached_tokens == 0
    assert same_pixels.tokens == first.tokens


async def test_prompts_that_sglang_sees_otherwise_are_rejected(case: EngineCase) -> None:
    """Two images without a token in between would be one; an image with pixels missing; the engine serves on."""
    both = await answer(case, spanned(case, 2), image(1, 1), image(1 + TOKENS, 2))
    assert both.finish == "rejected"
    assert "other images in the prompt" in both.steps[-1].detail
    short = await answer(case, spanned(case), replace(image(1), data=b"short"))
    assert short.finish == "rejected"
    assert f"an image of {HEIGHT * WIDTH * 3} bytes came with 5" in short.steps[-1].detail
    with pytest.raises(RequestRejected, match="without an image"):
        case.submit(case.request(spanned(case)))
    # SGLang looks for an image after each token that begins one.
    begun = await answer(case, [*spanned(case), spanned(case)[0]], image(1))
    assert begun.finish == "error"
    assert (await answer(case, spanned(case), image(1))).finish == "length"
