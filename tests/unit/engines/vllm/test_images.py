"""A prompt with images as vLLM takes it."""

import pytest

from headwater.engines.engine import RequestRejected
from headwater.engines.vllm.media import media_prompt
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.card import ImageSupport, MediaSupport

SUPPORT = MediaSupport(images=ImageSupport(placeholder=9, per_prompt=4, tokens=3))


def image(id_: str, start: int, data: bytes = bytes(range(12))) -> PromptMedia:
    """An image of 2 x 2 pixels with three tokens."""
    return PromptMedia("image", id_, start, 3, (2, 2, 3), data)


def test_each_image_has_one_placeholder_its_pixels_and_its_id() -> None:
    """VLLM repeats the placeholder itself."""
    prompt = media_prompt([1, 9, 9, 9, 2, 9, 9, 9], [image("a", 1), image("b", 5)], SUPPORT)
    assert prompt["prompt_token_ids"] == [1, 9, 2, 9]
    assert prompt["multi_modal_uuids"] == {"image": ["a", "b"]}
    first = prompt["multi_modal_data"]["image"][0]
    assert first.size == (2, 2)
    assert first.getpixel((1, 0)) == (3, 4, 5)
    assert media_prompt([1, 2], [], SUPPORT) == {"prompt_token_ids": [1, 2]}
    assert media_prompt([1, 9], [], MediaSupport()) == {"prompt_token_ids": [1, 9]}


@pytest.mark.parametrize(
    ("tokens", "media", "message"),
    [
        ([1, 9], [], "has the token 9, which stands for an image, without an image"),
        ([9, 9, 9, 9], [image("a", 0)], "without an image"),
        ([1, 9, 9, 9], [image("a", 0)], "tokens 0 to 3 of the prompt are not those of an image"),
        ([9, 9, 9], [image("a", 0, b"short")], "an image of 12 bytes came with 5"),
    ],
)
def test_prompts_that_vllm_would_end_on_are_rejected(
    tokens: list[int], media: list[PromptMedia], message: str
) -> None:
    """By this request alone."""
    with pytest.raises(RequestRejected, match=message):
        media_prompt(tokens, media, SUPPORT)
