"""Audio, video and embeddings: what is right is decoded, what is not is rejected with its code."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headwater.actors.media.av_decoder import sample_indices
from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.request import EmbeddingForm, MediaKind, MediaSource, MediaTarget
from tests.support.media.embeddings import embedding_file
from tests.support.media.images import encoded, picture
from tests.support.media.recordings import RATE_HZ, film, recording, safetensors, tone, turned, wav
from tests.unit.actors.media.conftest import TIGHT, rejection

FORM = EmbeddingForm(4)
VALUES = np.arange(12, dtype="<f4").tobytes()


def nan_wav() -> bytes:
    """A tone of floats with one value that is no number."""
    samples = np.zeros((1000, 1), "<f4")
    samples[500] = np.nan
    return wav(samples, tag=3)


def long_flac() -> bytes:
    """A FLAC file of 2.2 s that claims a thousand samples."""
    data = bytearray(recording("flac", "flac", 2.2))
    data[21:26] = bytes([data[21] & 0xF0]) + struct.pack(">I", 1000)
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("wav", lambda: wav(tone(0.5))),
        ("wav", lambda: wav(tone(0.5, channels=2))),
        ("wav", lambda: wav((tone(0.5, 16_000) / 32768).astype("<f4"), 16_000, tag=3)),
        ("flac", lambda: recording("flac", "flac", 0.5)),
        ("mp3", lambda: recording("mp3", "libmp3lame", 0.5)),
        ("ogg", lambda: recording("ogg", "libopus", 0.5, 48_000)),
        ("mp4", lambda: recording("mp4", "aac", 0.5)),
        ("webm", lambda: recording("webm", "libopus", 0.5, 48_000)),
    ],
    ids=["wav", "stereo", "floats", "flac", "mp3", "ogg", "mp4", "webm"],
)
async def test_sound_becomes_mono_samples_at_the_models_rate(
    strict: MediaIntake, name: str, make: Callable[[], bytes]
) -> None:
    """Half a second of 440 Hz, whatever it came as."""
    item = await strict.fetch(MediaSource.from_bytes("audio", make()), target=MediaTarget(rate_hz=16_000))
    samples = item.array()
    assert (item.format, item.dtype, item.kind) == (name, "float32", "audio")
    assert abs(item.seconds - 0.5) < 0.15
    assert item.shape == (round(item.seconds * 16_000),)
    spectrum = np.abs(np.fft.rfft(samples[:4000], 16_000))
    assert abs(int(spectrum.argmax()) - 440) <= 4
    assert 0.4 < float(np.abs(samples).max()) < 0.6


async def test_ids_of_sound_are_of_its_samples(strict: MediaIntake) -> None:
    """Lossless formats agree; another rate or sound does not."""
    ids = {
        name: (await strict.fetch(MediaSource.from_bytes("audio", data), target=MediaTarget(rate_hz=rate))).id
        for name, data, rate in (
            ("wav", wav(tone(0.2)), RATE_HZ),
            ("flac", recording("flac", "flac", 0.2), RATE_HZ),
            ("stereo", wav(tone(0.2, channels=2)), RATE_HZ),
            ("rate", wav(tone(0.2)), 16_000),
            ("other", wav(tone(0.2, hz=441)), RATE_HZ),
        )
    }
    assert ids["wav"] == ids["flac"]
    assert len({ids["wav"], ids["rate"], ids["other"]}) == 3


@pytest.mark.parametrize(("form", "codec"), [("mp4", "libx264"), ("webm", "libvpx")])
async def test_frames_are_sampled_from_the_whole_video(strict: MediaIntake, form: str, codec: str) -> None:
    """First, last and even steps; with their times."""
    video = MediaSource.from_bytes("video", film(20, form, codec))
    item = await strict.fetch(video, target=MediaTarget(frames=5))
    assert (item.shape, item.format, item.dtype) == ((5, 16, 32, 3), form, "uint8")
    assert (item.width, item.height) == (32, 16)
    assert np.allclose(item.times_s, [0.0, 0.5, 1.0, 1.4, 1.9], atol=0.11)
    right = item.array()[:, :, 20:].mean(axis=(1, 2, 3))
    assert np.allclose(right, [8 * time_s * 10 for time_s in item.times_s], atol=8)
    assert item.array()[:, :, :12].min() > 240
    everything = await strict.fetch(video, target=MediaTarget(frames=64))
    assert everything.shape[0] == 20
    assert everything.id != item.id


async def test_a_video_is_turned_as_its_header_says(strict: MediaIntake) -> None:
    """The white left half is above afterwards."""
    item = await strict.fetch(MediaSource.from_bytes("video", turned(film(3))))
    assert item.shape == (3, 32, 16, 3)
    assert item.array()[2, :12].min() > 200
    assert item.array()[2, 20:].max() < 60


def test_samples_of_frames() -> None:
    """Never more than there are, never twice."""
    assert sample_indices(3, 5) == [0, 1, 2]
    assert sample_indices(10, 1) == [0]
    assert sample_indices(10, 4) == [0, 3, 6, 9]
    assert sample_indices(0, 4) == []


@pytest.mark.parametrize("shape", [(3, 4), (1, 3, 4)])
async def test_an_embedding_passes_with_its_values(wide: MediaIntake, shape: tuple[int, ...]) -> None:
    """As one tensor of any name."""
    item = await wide.fetch(
        MediaSource.from_bytes("embedding", safetensors("F32", shape, VALUES)),
        target=MediaTarget(embedding=FORM),
    )
    assert (item.dtype, item.shape, bytes(item.data)) == ("F32", (3, 4), VALUES)
    assert item.width == 4


FILES: dict[str, tuple[MediaKind, Callable[[], bytes], str]] = {
    "sound that is too long": ("audio", lambda: wav(tone(2.2)), "media_too_long"),
    "sound that is longer than its header says": ("audio", long_flac, "media_too_long"),
    "sound of an hour at one sample a second": (
        "audio",
        lambda: wav(np.zeros((3600, 1), "<i2"), 1),
        "media_too_long",
    ),
    "an impossible sample rate": ("audio", lambda: wav(tone(0.1), 900_000), "media_malformed"),
    "too many channels": ("audio", lambda: wav(tone(0.1, channels=5)), "media_too_many_channels"),
    "samples that are no numbers": ("audio", nan_wav, "media_malformed"),
    "no samples": ("audio", lambda: wav(tone(0.0)), "media_malformed"),
    "a codec that is not listed": (
        "audio",
        lambda: wav(tone(0.5)).replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 2, 1), 1),
        "media_codec_not_allowed",
    ),
    "cut FLAC": ("audio", lambda: recording("flac", "flac", 0.5)[:60], "media_malformed"),
    "MP3 tag without sound": ("audio", lambda: b"ID3\4\0\0\0\0\0\0" + bytes(5000), "media_malformed"),
    "video without sound": ("audio", lambda: film(3), "media_wrong_type"),
    "image as sound": ("audio", lambda: encoded(picture(), "PNG"), "media_wrong_type"),
    "sound as video": ("video", lambda: recording("mp4", "aac", 0.5), "media_wrong_type"),
    "WAV as video": ("video", lambda: wav(tone(0.1)), "media_wrong_type"),
    "video that is too long": ("video", lambda: film(50), "media_too_long"),
    "video of too many frames": ("video", lambda: film(201, per_s=1_000), "media_too_long"),
    "frames with too many pixels": ("video", lambda: film(3, size=(160, 128)), "media_too_many_pixels"),
    "cut MP4": ("video", lambda: film(5)[:200], "media_wrong_type"),
    "cut WebM": ("video", lambda: film(5, "webm", "libvpx")[:60], "media_malformed"),
    "playlist in a video's clothes": (
        "video",
        lambda: b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        "media_malformed",
    ),
    "EBML without end": ("video", lambda: b"\x1a\x45\xdf\xa3" + b"\xff" * 5000, "media_malformed"),
}


@pytest.mark.parametrize("attack", FILES)
async def test_a_recording_is_rejected_by_its_contents(strict: MediaIntake, attack: str) -> None:
    """Before it is decoded, where its header is enough."""
    kind, make, code = FILES[attack]
    assert (await rejection(strict, MediaSource.from_bytes(kind, make()))).code == code


async def test_all_sampled_frames_together_have_a_limit(strict: MediaIntake) -> None:
    """Many small frames are as large as one large frame."""
    limits = TIGHT._replace(video=TIGHT.video._replace(sampled_pixels_max=32 * 16 * 4))
    error = await rejection(strict, MediaSource.from_bytes("video", film(5)), limits)
    assert error.code == "media_too_many_pixels"


BAD = "media_bad_embedding"
EMBEDDINGS: dict[str, tuple[Callable[[], bytes], str]] = {
    "pickle": (lambda: b"\x80\x04cos\nsystem\n(S'id'\ntR.", "media_unknown_type"),
    "archive of torch": (lambda: b"PK\3\4" + bytes(100), "media_unknown_type"),
    "two tensors": (lambda: safetensors("F32", (3, 4), VALUES, "a", "b"), BAD),
    "another width": (lambda: safetensors("F32", (4, 3), VALUES), BAD),
    "one dimension": (lambda: safetensors("F32", (12,), VALUES), BAD),
    "several items": (lambda: safetensors("F32", (3, 1, 4), VALUES), BAD),
    "integers": (lambda: safetensors("I32", (3, 4), VALUES), BAD),
    "doubles": (lambda: safetensors("F64", (3, 4), VALUES * 2), BAD),
    "no rows": (lambda: safetensors("F32", (0, 4), b""), BAD),
    "too many rows": (lambda: safetensors("F16", (17, 4), bytes(17 * 8)), BAD),
    "infinite": (lambda: safetensors("F32", (1, 4), np.array([1, 2, np.inf, 3], "<f4").tobytes()), BAD),
    "no number": (lambda: safetensors("F16", (1, 4), np.array([1, np.nan, 2, 3], "<f2").tobytes()), BAD),
    "no number in BF16": (lambda: safetensors("BF16", (1, 4), struct.pack("<4H", 0, 0, 0x7FC1, 0)), BAD),
    "shape that is not the data's": (lambda: safetensors("F32", (9, 4), VALUES), "media_malformed"),
    "header longer than the file": (lambda: struct.pack("<Q", 1 << 31) + b'{"a": 1}', "media_malformed"),
    "too large": (lambda: safetensors("F32", (3, 4), bytes(300_000)), "media_too_large"),
}


@pytest.mark.parametrize("attack", EMBEDDINGS)
async def test_an_embedding_is_one_finite_tensor_of_the_models_form(wide: MediaIntake, attack: str) -> None:
    """And in safetensors only."""
    make, code = EMBEDDINGS[attack]
    source = MediaSource.from_bytes("embedding", make())
    error = await rejection(wide, source, target=MediaTarget(embedding=FORM))
    assert error.code == code


GRIDDED = FORM._replace(grid=True)


async def test_the_grid_of_an_embedding_is_part_of_its_id(wide: MediaIntake) -> None:
    """Its positions in the prompt depend on it."""
    ids = {}
    for grid in ((1, 2, 6), (1, 6, 2)):
        file = embedding_file(np.ones((3, 4), np.float32), grid)
        item = await wide.fetch(
            MediaSource.from_bytes("embedding", file), target=MediaTarget(embedding=GRIDDED)
        )
        assert (item.shape, item.grid) == ((3, 4), grid)
        ids[grid] = item.id
    assert len(set(ids.values())) == 2


GRIDS: dict[str, dict[str, Any]] = {
    "no grid": {},
    "a grid of two numbers": {"image_grid_thw": np.array([2, 6], np.int64)},
    "a grid of fractions": {"image_grid_thw": np.array([1, 2, 6], np.float32)},
    "a video's grid": {"image_grid_thw": np.array([2, 2, 6], np.int64)},
    "a negative grid": {"image_grid_thw": np.array([1, -2, -6], np.int64)},
    "a grid of millions": {"image_grid_thw": np.array([1, 2, 6_000_000], np.int64)},
    "a third tensor": {"image_grid_thw": np.array([1, 2, 6], np.int64), "more": np.ones(3, np.int64)},
}


@pytest.mark.parametrize("attack", GRIDS)
async def test_the_grid_of_an_embedding_is_that_of_an_image(wide: MediaIntake, attack: str) -> None:
    """Engines take their positions from it, and end on others."""
    file = embedding_file(np.ones((3, 4), np.float32), **GRIDS[attack])
    source = MediaSource.from_bytes("embedding", file)
    error = await rejection(wide, source, target=MediaTarget(embedding=GRIDDED))
    assert error.code == BAD


async def test_embeddings_are_off_unless_they_are_expected(strict: MediaIntake) -> None:
    """By the model's workers."""
    source = MediaSource.from_bytes("embedding", safetensors("F32", (3, 4), VALUES))
    error = await rejection(strict, source, target=MediaTarget())
    assert error.code == "media_embeddings_not_allowed"
