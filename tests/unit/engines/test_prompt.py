"""Prompts with media are checked before an engine sees them."""

import numpy as np
import pytest

from headwater.engines.engine import RequestRejected
from headwater.engines.media import check_media, image_of, values_of
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import AudioSupport, ImageSupport, MediaSupport, VideoSupport

FIXED = MediaSupport(images=ImageSupport(placeholder=9, per_prompt=2, tokens=3))
BY_SIZE = MediaSupport(
    images=ImageSupport(placeholder=9, per_prompt=2, side=28, pixels_min=28 * 28, pixels_max=28 * 28 * 64)
)


def image(start: int, shape: tuple[int, ...] = (2, 2, 3), data: bytes = b"") -> PromptMedia:
    """An image with three tokens."""
    return PromptMedia("image", "a", start, 3, shape, data)


def test_prompts_with_all_of_their_images_are_accepted() -> None:
    """Also next to each other, and without any."""
    check_media([1, 2], [], FIXED)
    check_media([1, 9, 9, 9, 9, 9, 9], [image(1), image(4)], FIXED)
    check_media([1, 9, 9, 9], [image(1, (28, 84, 3))], BY_SIZE)


@pytest.mark.parametrize(
    ("tokens", "media", "support", "message"),
    [
        ([1, 9], [], FIXED, "has the token 9, which stands for an image, without an image"),
        ([9, 9, 9, 9], [image(0)], FIXED, "without an image"),
        ([1, 9, 9, 9], [image(0)], FIXED, "tokens 0 to 3 of the prompt are not those of an image"),
        ([9, 9, 9, 1], [image(0), image(0)], FIXED, "tokens 0 to 3 of the prompt are not those of an image"),
        ([9, 9], [image(0)], FIXED, "tokens 0 to 3 of the prompt are not those of an image"),
        ([9] * 9, [image(0), image(3), image(6)], FIXED, "3 images; at most 2 are possible"),
        (
            [9, 9, 9],
            [image(0, (28, 56, 3))],
            BY_SIZE,
            "56 x 28 pixels came with 3 tokens; this engine makes 2 of it",
        ),
        ([9, 9, 9], [image(0, (1, 201, 3))], BY_SIZE, "201 x 1 pixels is too narrow"),
    ],
)
def test_other_prompts_are_rejected(
    tokens: list[int], media: list[PromptMedia], support: MediaSupport, message: str
) -> None:
    """By what is wrong with them."""
    with pytest.raises(RequestRejected, match=message):
        check_media(tokens, media, support)


def test_each_kind_is_counted_and_placed_by_its_own_rule() -> None:
    """A kind that the engine does not take, the tokens of another kind, and one token too many."""
    videos = VideoSupport(
        frame=ImageSupport(placeholder=8, per_prompt=1, tokens=2), per_prompt=1, frames=4, group=2
    )
    audio = AudioSupport(placeholder=7, per_prompt=1, rate_hz=8_000, samples_max=80, stride=10)
    support = MediaSupport(FIXED.images, videos, audio)
    video = PromptMedia("video", "v", 0, 4, (3, 2, 2, 3))
    sound = PromptMedia("audio", "a", 4, 2, (25,))
    check_media([8, 8, 8, 8, 7, 7, 9, 9, 9], [video, sound, image(6)], support)
    for tokens, media, message in (
        ([8] * 4, [video], "this engine takes no videos"),
        ([9] * 4, [video], "tokens 0 to 4 of the prompt are not those of a video"),
        ([8] * 5, [video], "has the token 8, which stands for a video, without a video"),
        ([8] * 4 + [7] * 3, [video, sound], "token 7, which stands for an audio clip"),
        (
            [8] * 6,
            [PromptMedia("video", "v", 0, 6, (3, 2, 2, 3))],
            "3 frames of 2 x 2 pixels came with 6 tokens; .* 4 of it",
        ),
        ([8] * 6, [PromptMedia("video", "v", 0, 6, (5, 2, 2, 3))], "5 frames is too long"),
        ([7] * 9, [PromptMedia("audio", "a", 0, 9, (90,))], "0.0112 s is too long"),
        ([8] * 8, [video, PromptMedia("video", "w", 4, 4, (3, 2, 2, 3))], "2 videos; at most 1"),
        ([7], [PromptMedia("recording", "r", 0, 1, (10,))], "takes no recordings"),
    ):
        with pytest.raises(RequestRejected, match=message):
            check_media(tokens, media, FIXED if "takes no videos" in message else support)


def test_values_have_the_type_of_their_kind() -> None:
    """Frames are bytes, samples are floats."""
    sound = PromptMedia("audio", "a", 0, 1, (2,), np.array([0.5, -1], np.float32).tobytes())
    assert values_of(sound).tolist() == [0.5, -1.0]
    assert values_of(PromptMedia("video", "v", 0, 1, (1, 1, 2, 3), bytes(range(6)))).shape == (1, 1, 2, 3)
    with pytest.raises(RequestRejected, match="an audio clip of 8 bytes came with 2"):
        values_of(PromptMedia("audio", "a", 0, 1, (2,), b"ab"))


def test_pixels_have_to_be_all_there() -> None:
    """As many bytes as the shape says."""
    assert image_of(image(0, data=bytes(range(12)))).getpixel((1, 0)) == (3, 4, 5)
    with pytest.raises(RequestRejected, match="an image of 12 bytes came with 5"):
        image_of(image(0, data=b"short"))
