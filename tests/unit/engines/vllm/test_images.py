"""A prompt with images, videos and audio as vLLM takes it."""

from types import SimpleNamespace

import numpy as np
import pytest

from headwater.engines.engine import RequestRejected
from headwater.engines.vllm.media import media_prompt, media_settings, media_tokens_max
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import AudioSupport, ImageSupport, MediaSupport, VideoSupport

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


def test_prompts_that_vllm_would_end_on_are_rejected() -> None:
    """As `check_media` and `image_of` say."""
    with pytest.raises(RequestRejected, match="without an image"):
        media_prompt([1, 9], [], SUPPORT)
    with pytest.raises(RequestRejected, match="an image of 12 bytes came with 5"):
        media_prompt([9, 9, 9], [image("a", 0, b"short")], SUPPORT)


def test_videos_are_frames_and_audio_has_its_rate() -> None:
    """Each kind in a list of its own, in the order of the prompt; vLLM would resample audio of another rate."""
    support = MediaSupport(
        ImageSupport(placeholder=9, per_prompt=4, tokens=3),
        VideoSupport(
            frame=ImageSupport(placeholder=8, per_prompt=1, tokens=2), per_prompt=1, frames=4, group=2
        ),
        AudioSupport(placeholder=7, per_prompt=2, rate_hz=8_000, samples_max=80, stride=10),
    )
    frames, samples = (
        np.arange(36, dtype=np.uint8).reshape(3, 2, 2, 3),
        np.linspace(-1, 1, 20, dtype=np.float32),
    )
    video = PromptMedia("video", "v", 3, 4, frames.shape, frames.tobytes())
    sounds = [
        PromptMedia("audio", name, start, 2, samples.shape, samples.tobytes())
        for name, start in (("x", 0), ("y", 7))
    ]
    tokens = [7, 7, 1, 8, 8, 8, 8, 7, 7, 9, 9, 9]
    prompt = media_prompt(tokens, [sounds[0], video, sounds[1], image("i", 9)], support)
    assert prompt["prompt_token_ids"] == [7, 1, 8, 7, 9]
    assert prompt["multi_modal_uuids"] == {"audio": ["x", "y"], "video": ["v"], "image": ["i"]}
    data = prompt["multi_modal_data"]
    assert np.array_equal(data["video"][0], frames)
    (heard, rate_hz), _ = data["audio"]
    assert np.array_equal(heard, samples)
    assert rate_hz == 8_000
    assert data["image"][0].size == (2, 2)


def test_arguments_about_media_differ_by_their_values() -> None:
    """Their order and the device on which images are processed make no difference."""

    def settings(**given: object) -> str:
        own = SimpleNamespace(mm_processor_kwargs=given or None)
        return media_settings(SimpleNamespace(model_config=SimpleNamespace(multimodal_config=own)))

    assert settings() == settings(device="cpu") == ""
    assert settings(max_pixels=784, device="cpu") == settings(max_pixels=784) != settings(max_pixels=1_568)
    assert settings(a=1, b=2) == settings(b=2, a=1)


def test_items_may_have_as_many_tokens_as_the_encoder_cache() -> None:
    """Of the kinds that the model takes; a release without that number publishes none."""
    engine = SimpleNamespace(input_processor=SimpleNamespace(mm_encoder_cache_size=2_048))
    assert media_tokens_max(engine, SUPPORT) == {"image": 2_048}
    assert media_tokens_max(SimpleNamespace(), SUPPORT) == {}
