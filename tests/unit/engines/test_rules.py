"""Rules of media tokens: the one that fits what a processor makes is found, and none where none does."""

from types import SimpleNamespace

import pytest

from headwater.engines.media import VideoSize, fitting_audio_rule, fitting_video_rule, probes
from headwater.schemas.tables import (
    AudioSupport,
    ImageSupport,
    VideoSupport,
    count_image_tokens,
    count_video_tokens,
)

FRAME = ImageSupport(placeholder=9, per_prompt=2, side=28, pixels_min=3_136, pixels_max=50_176)
CONFIG = SimpleNamespace(vision_config=SimpleNamespace(patch_size=14, spatial_merge_size=2))
PROCESSOR = SimpleNamespace(temporal_patch_size=2, size={"shortest_edge": 3_136, "longest_edge": 50_176})
RATE_HZ = 16_000


def fitting(found: dict[VideoSize, int], frames: int = 32) -> VideoSupport | None:
    """The rule for videos that have these tokens."""
    return fitting_video_rule(CONFIG, PROCESSOR, placeholder=9, limit=2, frames=frames, found=found)


def test_two_frames_have_the_tokens_of_an_image() -> None:
    """Qwen2-VL's rule, from what vLLM 0.32 made of these sizes; the last group may have one frame."""
    assert probes(32) == ((1, 64, 64), (2, 64, 64), (3, 120, 500), (32, 900, 333))
    assert probes(2) == ((1, 64, 64), (2, 64, 64), (2, 900, 333))
    found = {(1, 64, 64): 4, (2, 64, 64): 4, (3, 120, 500): 96, (4, 900, 333): 104, (32, 2_000, 1_500): 864}
    assert fitting(found) == VideoSupport(frame=FRAME, per_prompt=2, frames=32, group=2)


def test_a_fixed_number_for_each_frame() -> None:
    """As LLaVA-NeXT-Video has it."""
    rule = fitting({size: 144 * size[0] for size in probes(8)}, 8)
    assert rule == VideoSupport(
        frame=ImageSupport(placeholder=9, per_prompt=2, tokens=144), per_prompt=2, frames=8, group=1
    )
    assert count_video_tokens(rule, 3, 1, 5_000) == 432


@pytest.mark.parametrize("wrong", [-1, 0, 95, 97, 98])
def test_other_counts_fit_no_rule(wrong: int) -> None:
    """Tokens in between, a number that no frame of this size has, or one that is not of whole groups."""
    assert fitting({(1, 64, 64): 4, (2, 64, 64): 4, (3, 120, 500): wrong, (32, 900, 333): 832}) is None


def test_equal_groups_have_equal_tokens() -> None:
    """One frame alone is a whole group: a model that counts it otherwise fits no rule."""
    found = {(1, 64, 64): 4, (2, 64, 64): 4, (3, 120, 500): 96, (32, 900, 333): 832}
    assert fitting(found) is not None
    assert fitting(found | {(1, 64, 64): 3}) is None


def test_a_budget_of_all_frames_fits_no_rule() -> None:
    """A model that makes frames smaller the more there are: seen at the longest video."""
    found = {size: count_image_tokens(FRAME, *size[1:]) * -(-size[0] // 2) for size in probes(32)}
    assert fitting(found) is not None
    found[32, 900, 333] //= 2
    assert fitting(found) is None


def test_a_video_has_no_more_frames_than_the_model_takes() -> None:
    """The intake samples that many; an engine refuses others."""
    rule = VideoSupport(frame=FRAME, per_prompt=2, frames=4, group=2)
    assert count_video_tokens(rule, 4, 64, 64) == 8
    with pytest.raises(ValueError, match="a video of 5 frames is too long: at most 4"):
        count_video_tokens(rule, 5, 64, 64)
    with pytest.raises(ValueError, match="too narrow"):
        count_video_tokens(rule, 1, 1, 201)


def hearing(count: int | None = None, window_s: float = 30.0, **rule: int) -> AudioSupport | None:
    """The rule for a processor with this one, which refuses what is too short; `count`: of other recordings."""
    longest, calls = int(window_s * RATE_HZ), []

    def tokens(samples: int) -> int:
        calls.append(samples)
        if count is not None and samples == 3 * RATE_HZ:
            return count
        return (min(samples, longest) + rule["offset"]) // rule["stride"]

    found = fitting_audio_rule(tokens, placeholder=7, limit=3, rate_hz=RATE_HZ, window_s=window_s, hop=160)
    # Each takes vLLM's processor a tenth of a second.
    assert len(calls) < 25
    return found


@pytest.mark.parametrize(
    ("stride", "offset"),
    [(640, 319), (640, 0), (640, 639), (1_280, 1_279), (2_560, 2_559), (160, 80), (3_200, -160)],
)
def test_samples_per_token_and_their_rounding_are_measured(stride: int, offset: int) -> None:
    """Qwen2-Audio's is 640 and 319. Voxtral's 1,280 and Ultravox's 2,560 are rounded up."""
    assert hearing(stride=stride, offset=offset) == AudioSupport(
        placeholder=7, per_prompt=3, rate_hz=RATE_HZ, samples_max=480_000, stride=stride, offset=offset
    )


def test_audio_that_fits_no_rule_is_not_served() -> None:
    """Other counts in between, other tokens, and a window of one token."""
    assert hearing(stride=640, offset=319, count=74) is None
    assert hearing(stride=640, offset=319, count=-1) is None
    assert hearing(stride=480_000, offset=0) is None
