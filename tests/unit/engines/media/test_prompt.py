"""Prompts with images are checked before an engine sees them."""

import pytest

from headwater.engines.engine import RequestRejected
from headwater.engines.media.prompt import check_media, image_of
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.card import ImageSupport, MediaSupport

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


def test_pixels_have_to_be_all_there() -> None:
    """As many bytes as the shape says."""
    assert image_of(image(0, data=bytes(range(12)))).getpixel((1, 0)) == (3, 4, 5)
    with pytest.raises(RequestRejected, match="an image of 12 bytes came with 5"):
        image_of(image(0, data=b"short"))
