"""Images on the real SGLang without a fleet: what is reused, embeddings that it is given (of videos too), and prompts that no edge sends."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace

from headwater.engines.engine import EncodedImage, EngineError, RequestRejected
from headwater.engines.sglang.embedding_input import SglangEmbeddings
from headwater.schemas.media import PromptMedia
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.engines.multimodal.media_requests import answer, answer_from_cache, indexed, rejection
from tests.support.marks import SGLANG_HERE
from tests.support.ports.engines import EngineCase, sglang_engine, started
from tests.support.sglang.encoding import encoded_apart

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300), *SGLANG_HERE]

HEIGHT, WIDTH, TOKENS = 196, 224, 56
ENCODED = (1, 2, 3)
"""Seeds of images whose embeddings are at hand."""

FRAMES, VIDEO_SIDE, VIDEO_TOKENS = 5, 112, 48
"""Of a video: two frames of 112 x 112 pixels make 16 tokens, and the last one of an odd number counts as two."""

FILMED = (11, 12)
"""Seeds of videos whose embeddings are at hand."""

SALTS = 6


@pytest.fixture(scope="module")
def embeddings(sglang_model: str) -> dict[int, EncodedImage]:
    """What SGLang's encoder makes of images and videos, in a process of its own: by seed."""
    items = [*(image(0, seed) for seed in ENCODED), *(video(0, seed) for seed in FILMED)]
    return dict(zip((*ENCODED, *FILMED), encoded_apart(items), strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(embeddings: dict[int, EncodedImage]) -> AsyncIterator[EngineCase]:
    """An engine with the tiny model that takes images, or their embeddings. After another one's process was forked from this one."""
    engine = sglang_engine(
        str(tiny_vision_model.ensure()),
        max_model_len=1024,
        given={"skip_tokenizer_init": False},
        reads_embeddings=True,
    )
    async with started(engine) as made:
        yield made


def image(start: int, seed: int = 1, id_: str = "") -> PromptMedia:
    """An image with noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    return PromptMedia(
        "image", id_ or f"{seed:032x}"[::-1], start, TOKENS, (HEIGHT, WIDTH, 3), pixels.tobytes()
    )


def video(start: int, seed: int, id_: str = "") -> PromptMedia:
    """A video with noise."""
    shape = (FRAMES, VIDEO_SIDE, VIDEO_SIDE, 3)
    frames = np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)
    return PromptMedia("video", id_ or f"{seed:032x}"[::-1], start, VIDEO_TOKENS, shape, frames.tobytes())


def spanned(case: EngineCase, images: int = 1) -> list[int]:
    """The tokens of images next to each other, within those of a beginning and an end."""
    assert case.info.media.images is not None
    # Their ids follow each other.
    pad = case.info.media.images.placeholder
    begin, end = pad - 2, pad - 1
    return [begin, *[pad] * TOKENS * images, end]


async def test_an_image_is_known_by_its_id(case: EngineCase) -> None:
    """Its blocks have the names that an edge computes. The id decides, not the pixels: those of another id are never reused."""
    before, after = case.prompt(0.5), case.prompt(1)
    prompt = [*before, *spanned(case), *after]
    place = image(len(before) + 1)
    first = await answer_from_cache(case, prompt, place)
    same_pixels = await answer(case, prompt, image(place.start, 1, "b" * 32))
    assert same_pixels.cached_tokens == 0
    assert same_pixels.tokens == first.tokens


def given(item: PromptMedia, id_: str) -> PromptMedia:
    """The image under another name, without pixels."""
    return replace(item, id=id_ * 32, data=b"")


def images_encoded(case: EngineCase) -> int:
    """How many the engine has encoded itself."""
    found = getattr(case.engine, "_embeddings", None)
    assert isinstance(found, SglangEmbeddings)
    return found.encoded


async def test_an_embedding_in_the_place_of_pixels_gives_the_same_tokens(
    case: EngineCase, embeddings: dict[int, EncodedImage]
) -> None:
    """Of one image and of two, next to a request with pixels in one batch. Nothing is encoded again, and the names of blocks are the same."""
    before, between, after = case.prompt(0.5), case.prompt(0.3), case.prompt(1)
    one = [*before, *spanned(case), *after]
    two = [*before, *spanned(case), *between, *spanned(case), *after]
    first = image(len(before) + 1, 1, "c" * 32)
    second = image(len(before) + 1 + TOKENS + 1 + len(between) + 1, 2, "d" * 32)
    expected = [await answer(case, one, first), await answer(case, two, first, second)]
    assert expected[0].tokens != expected[1].tokens
    twins = [given(first, "e"), given(second, "f")]
    for seed, twin in enumerate(twins, 1):
        assert not case.engine.holds_embedding(twin)
        assert embeddings[seed].fields == b'{"image_grid_thw":[1,14,16]}'
        await case.engine.put_embedding(twin, embeddings[seed])
        assert case.engine.holds_embedding(twin)
    encoded = images_encoded(case)
    # Each several times, none of which finds another's blocks: while one is computed, the others come together.
    wanted = [(two, twins), (one, [image(len(before) + 1, 9)])] * SALTS
    found = await asyncio.gather(
        *(
            case.submit(replace(case.request(prompt), media=tuple(media), cache_salt=f"{number}")).ended()
            for number, (prompt, media) in enumerate(wanted)
        )
    )
    assert [(each.tokens, each.cached_tokens) for each in found[::2]] == [(expected[1].tokens, 0)] * SALTS
    assert [each.finish for each in found[1::2]] == ["length"] * SALTS
    assert images_encoded(case) == encoded + 1
    again = await answer(case, one, twins[0])
    assert again.tokens == expected[0].tokens
    names = await indexed(case, one, twins[0])
    # From pixels again: their blocks are found.
    pixels = await answer(case, one, replace(first, id=twins[0].id))
    assert pixels.cached_tokens == len(names) * case.info.block_size
    assert images_encoded(case) == encoded + 1


async def test_the_embeddings_of_videos_give_the_same_tokens(
    case: EngineCase, embeddings: dict[int, EncodedImage]
) -> None:
    """Of one video, of two, and of one next to an image. Nothing is encoded again, and the answer is of the embedding."""
    assert case.info.media.videos is not None
    pad = case.info.media.videos.placeholder
    [begin, *_, end] = spanned(case)
    filmed = [begin, *[pad] * VIDEO_TOKENS, end]
    before, after = case.prompt(0.5), case.prompt(1)
    first = len(before) + 1
    one, two = [*before, *filmed, *after], [*before, *filmed, *filmed, *after]
    beside = [*before, *filmed, *spanned(case), *after]
    second = first + VIDEO_TOKENS + 2
    films = [video(first, 11, "3" * 32), video(second, 12, "4" * 32)]
    prompts = [(one, films[:1]), (two, films), (beside, [films[0], image(second, 1, "5" * 32)])]
    expected = [await answer(case, prompt, *media) for prompt, media in prompts]
    assert len({tuple(each.tokens) for each in expected}) == len(prompts)
    twins = {"3": given(films[0], "6"), "4": given(films[1], "7"), "5": given(image(second, 1), "a")}
    for key, seed in (("3", 11), ("4", 12), ("5", 1)):
        await case.engine.put_embedding(twins[key], embeddings[seed])
        assert case.engine.holds_embedding(twins[key])
    assert embeddings[11].fields == b'{"video_grid_thw":[3,8,8]}'
    encoded = images_encoded(case)
    found = [
        await answer(case, prompt, *(twins[item.id[0]] for item in media), salt="apart")
        for prompt, media in prompts
    ]
    assert [(each.tokens, each.cached_tokens > 0) for each in found] == [
        (each.tokens, place > 0) for place, each in enumerate(expected)
    ]
    assert images_encoded(case) == encoded
    other = given(video(first, 11), "b")
    await case.engine.put_embedding(other, embeddings[12])
    assert (await answer(case, one, other)).tokens == (await answer(case, one, video(first, 12))).tokens


async def test_the_answer_is_of_the_embedding(case: EngineCase, embeddings: dict[int, EncodedImage]) -> None:
    """One of another image gives that one's answer: the engine has nothing else to look at."""
    prompt = [*case.prompt(0.5), *spanned(case), *case.prompt(1)]
    start = prompt.index(spanned(case)[1])
    expected = await answer(case, prompt, image(start, 3))
    twin = given(image(start, 1), "9")
    await case.engine.put_embedding(twin, embeddings[3])
    assert (await answer(case, prompt, twin)).tokens == expected.tokens


async def test_an_embedding_of_another_shape_is_not_taken(
    case: EngineCase, embeddings: dict[int, EncodedImage]
) -> None:
    """SGLang's scheduler would end on one with fewer rows."""
    twin = given(image(1), "8")
    for values in (embeddings[1].values[1:], embeddings[1].values[:, 1:]):
        with pytest.raises(EngineError, match="must have the same model"):
            await case.engine.put_embedding(twin, embeddings[1]._replace(values=values))
    assert not case.engine.holds_embedding(twin)


async def test_prompts_that_sglang_sees_otherwise_are_rejected(case: EngineCase) -> None:
    """Two images without a token in between would be one; an image with pixels missing; the engine serves on."""
    both = await rejection(case, spanned(case, 2), image(1, 1), image(1 + TOKENS, 2))
    assert "other media in the prompt" in both
    short = await rejection(case, spanned(case), replace(image(1), data=b"short"))
    assert f"an image of {HEIGHT * WIDTH * 3} bytes came with 5" in short
    with pytest.raises(RequestRejected, match="without an image"):
        case.submit(case.request(spanned(case)))
    # SGLang looks for an image after each token that begins one.
    begun = await answer(case, [*spanned(case), spanned(case)[0]], image(1))
    assert begun.finish == "error"
    assert (await answer(case, spanned(case), image(1))).finish == "length"
