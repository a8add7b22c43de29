"""Videos and audio in conversations: decoded to what the model takes, counted by its rules, and put where the template has them."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headwater.actors.edge.prompt.media import LoadedMedia, fetch_parts, load_media, url_media
from headwater.actors.edge.prompt.prompts import expand_placeholders
from headwater.actors.edge.prompt.request import MediaPart, TextPart, Turn
from headwater.actors.http.errors import ApiError
from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.item import MediaItem
from headwater.actors.media.request import FetchPolicy, MediaLimits, MediaSource, MediaTarget
from headwater.schemas.inference import Sampling
from headwater.schemas.media import media_features
from headwater.schemas.tables import AudioSupport, ImageSupport, VideoSupport, required_capabilities
from tests.support.media.images import data_url
from tests.support.media.recordings import film, tone, wav
from tests.unit.actors.edge.prompt.test_images import model, tokens

FRAME = ImageSupport(placeholder=5, per_prompt=2, side=28, pixels_min=784, pixels_max=784 * 64)
VIDEOS = VideoSupport(frame=FRAME, per_prompt=2, frames=6, group=2)
AUDIO = AudioSupport(placeholder=7, per_prompt=2, rate_hz=8_000, samples_max=16_000, stride=320, offset=159)
TAKEN: dict[str, Any] = {"videos": VIDEOS, "audio": AUDIO}


def video(frames: int, number: int = 0) -> MediaPart:
    """A video of 56 x 28 pixels at a place of the first message."""
    url = data_url(film(frames, size=(56, 28)), "video/mp4")
    return MediaPart("video", f"messages[0].content[{number}].video_url", url=url)


def sound(seconds: float, number: int = 0, rate_hz: int = 16_000) -> MediaPart:
    """A tone at a place of the first message."""
    url = data_url(wav(tone(seconds, rate_hz), rate_hz), "audio/wav")
    return MediaPart("audio", f"messages[0].content[{number}].audio_url", url=url)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_videos_and_audio_are_decoded_to_what_the_model_takes(intake: MediaIntake) -> None:
    """Frames and rate are those of its card; tokens are counted by its rules."""
    turn = Turn(role="user", parts=(video(20), TextPart("and"), sound(1.0, 2), video(3, 3)))
    loaded = await load_media([turn], model(**TAKEN), intake)
    assert [item.shape for item in loaded.items] == [(6, 28, 56, 3), (8_000,), (3, 28, 56, 3)]
    assert loaded.tokens == (3 * 2, (8_000 + 159) // 320, 2 * 2)
    fewer = msgspec.structs.replace(VIDEOS, frames=4)
    other = await load_media([turn], model(videos=fewer, audio=AUDIO), intake)
    assert other.items[0].shape == (4, 28, 56, 3)
    # The item is what the model sees: its name follows from that.
    assert other.items[0].id != loaded.items[0].id
    assert other.items[1].id == loaded.items[1].id


@pytest.mark.parametrize(
    ("parts", "taken", "code", "message", "param"),
    [
        (
            (video(1),),
            {"audio": AUDIO},
            "media_not_taken",
            "takes text, images and audio clips; ",
            "0].video_url",
        ),
        (
            (sound(0.1),),
            {"videos": VIDEOS},
            "media_not_taken",
            "takes text, images and videos; ",
            "0].audio_url",
        ),
        ((video(1),), {"images": None}, "media_not_taken", "takes text only; ", "0].video_url"),
        (
            tuple(video(1, n) for n in range(3)),
            TAKEN,
            "too_many_videos",
            "3 videos; .* most 2",
            "2].video_url",
        ),
        (
            tuple(sound(0.1, n) for n in range(3)),
            TAKEN,
            "too_many_audio_clips",
            "3 audio clips; .* most 2",
            "2].audio_url",
        ),
        ((sound(2.5),), TAKEN, "media_too_long", "longer than 2 s", "0].audio_url"),
        ((sound(0.01),), TAKEN, "audio_shape", "too short: at least 0.0201 s", "0].audio_url"),
    ],
)
async def test_what_a_model_does_not_take_is_refused_by_name(
    intake: MediaIntake,
    parts: tuple[MediaPart, ...],
    taken: dict[str, Any],
    code: str,
    message: str,
    param: str,
) -> None:
    """The part, and what the model takes instead."""
    with pytest.raises(ApiError, match=message) as raised:
        await load_media([Turn(role="user", parts=parts)], model(**taken), intake)
    assert (raised.value.status, raised.value.code) == (400, code)
    assert raised.value.param == f"messages[0].content[{param}"


def item(kind: Any, id_: str, *shape: int) -> MediaItem:
    return MediaItem(kind, id_, "uint8", shape, memoryview(b""), "")


async def test_each_kind_has_its_own_placeholder() -> None:
    """In the order of the conversation; what stands for the wrong kind is no place."""
    taken = model(**TAKEN)
    items = (item("video", "v", 3, 28, 56, 3), item("image", "i", 28, 28, 3), item("audio", "a", 800))
    loaded = LoadedMedia(items, (4, 1, 3))
    found, media = expand_placeholders(tokens(1, 5, 2, 9, 7, 3), loaded, taken, "messages")
    assert found.tolist() == [1, 5, 5, 5, 5, 2, 9, 7, 7, 7, 3]
    assert [(one.kind, one.id, one.start, one.tokens) for one in media] == [
        ("video", "v", 1, 4),
        ("image", "i", 6, 1),
        ("audio", "a", 7, 3),
    ]
    assert required_capabilities(Sampling(1), **media_features(media)) == ("images", "videos", "audio")
    for given, message in (
        (tokens(1, 9, 5, 7), "another order"),
        (tokens(1, 5, 7), "made 0 places for 1 images"),
        (tokens(1, 5, 9, 7, 7), "made 2 places for 1 audio clips"),
    ):
        with pytest.raises(ApiError, match=message):
            expand_placeholders(given, loaded, taken, "messages")
    for token, one in ((5, "a video"), (7, "an audio clip"), (9, "an image")):
        with pytest.raises(ApiError, match=f"stands for {one}, without {one}"):
            expand_placeholders(tokens(token), LoadedMedia(), taken, "messages")
    # What has no meaning for this model is a token like any other.
    assert np.array_equal(expand_placeholders(tokens(5, 7), LoadedMedia(), model(), "prompt")[0], [5, 7])


async def test_files_of_the_server_are_for_the_intake_to_accept(intake: MediaIntake, tmp_path: Path) -> None:
    """By configuration; otherwise the scheme is named."""
    part = url_media("video", "file:///srv/media/a.mp4", "messages[0].content[0].video_url")
    with pytest.raises(ApiError) as raised:
        await load_media([Turn(role="user", parts=(part,))], model(**TAKEN), intake)
    assert raised.value.code == "media_scheme_not_allowed"
    (tmp_path / "a.mp4").write_bytes(film(3, size=(56, 28)))
    here = url_media("video", f"file://{tmp_path}/a.mp4", "messages[0].content[0].video_url")
    allowed = MediaIntake(FetchPolicy(schemes=("https", "data", "file"), directories=(str(tmp_path),)))
    try:
        found = await load_media([Turn(role="user", parts=(here,))], model(**TAKEN), allowed)
    finally:
        await allowed.close()
    sent = await load_media([Turn(role="user", parts=(video(3),))], model(**TAKEN), intake)
    assert found.items[0].id == sent.items[0].id


NO_TARGET = MediaTarget()


class NoFetcher:
    """Fetches nothing; notes what it was asked for."""

    limits = MediaLimits()

    def __init__(self) -> None:
        self.asked: list[MediaSource] = []

    async def fetch(
        self, source: MediaSource, limits: MediaLimits | None = None, target: MediaTarget = NO_TARGET
    ) -> MediaItem:
        """See `MediaFetcher.fetch`."""
        del limits, target
        self.asked.append(source)
        await asyncio.Event().wait()
        raise AssertionError("nothing is fetched")


async def test_a_part_that_is_refused_leaves_no_other_to_be_fetched() -> None:
    """Nobody would wait for it: it would hold a place at the intake after its request has failed."""
    fetcher = NoFetcher()
    urls = [
        MediaPart("image", f"messages[0].content[{place}]", url="https://a.example/b") for place in range(8)
    ]
    with pytest.raises(ApiError, match="no files API"):
        await fetch_parts([*urls, MediaPart("image", "messages[0].content[8]", file_id="f")], fetcher, {})
    await asyncio.sleep(0)
    assert fetcher.asked == []
