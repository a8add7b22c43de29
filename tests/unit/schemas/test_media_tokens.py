"""Placeholder tokens of media by their shape, and the digests by which blocks with media are told apart."""

import msgspec
import pytest

from headwater.engines.kv_events import multimodal
from headwater.schemas.hashing import media_digests
from headwater.schemas.media import PromptMediaKind
from headwater.schemas.tables import (
    AudioSupport,
    Capability,
    ImageSupport,
    MediaSupport,
    VideoSupport,
    count_audio_tokens,
    count_image_tokens,
    count_media_tokens,
    kinds_encoded,
)

GRID = ImageSupport(placeholder=7, per_prompt=4, side=28, pixels_min=4 * 28 * 28, pixels_max=64 * 28 * 28)


@pytest.mark.parametrize(
    ("height", "width", "tokens"),
    [
        # What `smart_resize` of transformers 5 gives with the same bounds.
        (196, 224, 56),
        (1100, 1500, 54),
        (64, 64, 4),
        (120, 500, 48),
        (900, 333, 52),
        (2000, 1500, 54),
        (28, 28, 4),
        (30, 3000, 80),
    ],
)
def test_the_count_is_that_of_the_models_processor(height: int, width: int, tokens: int) -> None:
    """Rounded to squares, shrunk or enlarged to the bounds."""
    assert count_image_tokens(GRID, height, width) == tokens


def test_a_fixed_count_and_a_shape_that_no_model_takes() -> None:
    """The ratio of the sides is bounded where images are resized."""
    assert count_image_tokens(ImageSupport(placeholder=7, per_prompt=1, tokens=576), 1, 5_000) == 576
    with pytest.raises(
        ValueError, match=r"3000 x 10 pixels is too narrow: the ratio of its sides is at most 200"
    ):
        count_image_tokens(GRID, 10, 3_000)


def test_the_edge_and_an_engines_events_name_the_same_blocks() -> None:
    """Keys as vLLM published them for an image of 56 tokens from token 17 on, with blocks of 32."""
    cat = "a" * 32
    published = [[[cat, 17]], [[cat, -15]], [[cat, -47]]]
    assert media_digests([(cat, 17, 56)], 32) == multimodal(published)


def test_digests_depend_on_the_item_and_where_it_is() -> None:
    """Two images of one block in the other order have other digests, though their sum is of the same ids."""
    one = media_digests([("a" * 32, 0, 4), ("b" * 32, 4, 4)], 16)
    other = media_digests([("b" * 32, 0, 4), ("a" * 32, 4, 4)], 16)
    assert [block for block, _ in one] == [0, 0]
    assert sum(digest for _, digest in one) != sum(digest for _, digest in other)
    # An item that ends with a block does not reach into the next one.
    assert [block for block, _ in media_digests([("a" * 32, 0, 16)], 16)] == [0]


HEARING = AudioSupport(
    placeholder=8, per_prompt=1, rate_hz=16_000, samples_max=480_000, stride=640, offset=319
)


@pytest.mark.parametrize(
    ("samples", "tokens"),
    [(321, 1), (400, 1), (960, 1), (961, 2), (16_000, 25), (48_000, 75), (480_000, 750)],
)
def test_tokens_of_audio(samples: int, tokens: int) -> None:
    """What vLLM 0.32 made of Qwen2-Audio's placeholder."""
    assert count_media_tokens(MediaSupport(audio=HEARING), "audio", (samples,)) == tokens


@pytest.mark.parametrize(
    ("samples", "message"), [(320, "0.02 s is too short: at least 0.0201 s"), (480_001, "at most 30 s")]
)
def test_audio_that_a_model_cannot_hear(samples: int, message: str) -> None:
    """Shorter than one token, or longer than it listens: the rest would be cut off."""
    with pytest.raises(ValueError, match=message):
        count_audio_tokens(HEARING, samples)


def test_a_model_has_only_the_kinds_that_it_takes() -> None:
    """Each counted by its own rule; capabilities, limits and placeholders are of these kinds."""
    videos = VideoSupport(frame=msgspec.structs.replace(GRID, placeholder=5), per_prompt=2, frames=8, group=2)
    support = MediaSupport(images=GRID, videos=videos)
    assert count_media_tokens(support, "image", (56, 56, 3)) == 4
    assert count_media_tokens(support, "video", (3, 56, 56, 3)) == 8
    with pytest.raises(ValueError, match="the model takes no audio clips"):
        count_media_tokens(support, "audio", (16_000,))
    assert support.capabilities == {"images", "videos"}
    assert support.limits == {"image": GRID.per_prompt, "video": 2}
    assert support.placeholders == {"image": GRID.placeholder, "video": 5}


# What follows from the capabilities of a worker.


@pytest.mark.parametrize(
    ("taken", "capabilities", "kinds"),
    [
        (("image",), {"encode"}, ("image",)),
        (("image", "video", "audio"), {"encode", "videos", "audio"}, ("image", "video", "audio")),
        (("image", "video"), {"encode"}, ("image",)),
        (("audio",), {"encode", "audio"}, ("audio",)),
        ((), {"encode", "videos"}, ()),
        (("image", "video", "audio"), {"videos", "audio"}, ()),
    ],
)
def test_an_encode_worker_encodes_kinds_that_its_model_takes(
    taken: tuple[PromptMediaKind, ...], capabilities: set[Capability], kinds: tuple[PromptMediaKind, ...]
) -> None:
    """A model for audio takes no images, although every encode worker of images is capable of `encode` alone."""
    assert kinds_encoded(taken, capabilities) == kinds
