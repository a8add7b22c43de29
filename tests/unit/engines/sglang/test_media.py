"""Which models' media are not even tried with SGLang, and items that it bundles; what the others do is tested with the real one."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from headwater.engines.kv_events import MediaSentinels
from headwater.engines.sglang.media import LENGTHS, learn_media, media_settings, share_lengths, single_items
from headwater.engines.sglang.signatures import LACKS, Signatures

VISION = SimpleNamespace(image_token_id=9)
FILMS = SimpleNamespace(video_token_id=9)
HEARING = SimpleNamespace(audio_token_index=9)
TEXT = SimpleNamespace()
NOW, BEFORE = LACKS["0.5.23"], LACKS["0.5.22"]


@pytest.mark.parametrize(
    ("processor", "model", "config", "lacks", "reason"),
    [
        (None, VISION, {}, NOW, ""),
        (object(), TEXT, {}, NOW, ""),
        (object(), VISION, {"limit_mm_data_per_request": {"image": 0}}, NOW, ""),
        (object(), VISION, {"language_only": True}, NOW, ""),
        (object(), VISION, {"language_model_only": True}, NOW, ""),
        (object(), VISION, {}, BEFORE, "before 0.5.23 SGLang distinguishes media by 30 bits"),
        (object(), VISION, {}, NOW, "AttributeError"),
        (object(), FILMS, {"limit_mm_data_per_request": {"video": 0}}, NOW, ""),
        (object(), FILMS, {}, BEFORE, "before 0.5.23 SGLang distinguishes media by 30 bits"),
        (object(), FILMS, {}, NOW, "AttributeError"),
        (object(), HEARING, {"limit_mm_data_per_request": {"audio": 0}}, NOW, ""),
        (object(), HEARING, {}, BEFORE, "before 0.5.23 SGLang distinguishes media by 30 bits"),
        (object(), HEARING, {}, NOW, "AttributeError"),
    ],
)
async def test_these_serve_text_only(
    processor: Any, model: Any, config: Any, lacks: Any, reason: str
) -> None:
    """Text models silently. A release that would confuse media, and a processor that fails, with the reason."""
    manager = SimpleNamespace(mm_processor=processor, model_config=SimpleNamespace(hf_config=model))
    with capture_logs() as logs:
        found = await learn_media(manager, {"model_path": "m", **config}, Signatures(lacks), MediaSentinels())
    assert found is None
    assert [(one["event"], one["reason"].startswith(reason)) for one in logs] == (
        [("media_not_served", True)] if reason else []
    )


def bundle(offsets: list[tuple[int, int]], **fields: Any) -> Any:
    """An item as SGLang's processor returns it, of rows 0, 1, 2, …."""
    return SimpleNamespace(
        offsets=offsets,
        feature=np.arange(30)[:, None],
        precomputed_embeddings=None,
        model_specific_data=fields,
        is_audio=lambda: LENGTHS in fields or not fields,
    )


def test_videos_that_sglang_bundles_are_taken_apart() -> None:
    """Each with its rows and its grid. What has another number of places is left, and rejected later."""
    grids = np.array([[2, 2, 4], [1, 2, 2], [5, 1, 2]])
    together = bundle([(1, 4), (6, 6), (8, 12)], video_grid_thw=grids, second_per_grid_ts=[1.0, 2.0, 3.0])
    found = list(single_items(together))
    assert [one.offsets for one in found] == [[(1, 4)], [(6, 6)], [(8, 12)]]
    rows = [one.feature[:, 0].tolist() for one in found]
    assert rows == [list(range(16)), list(range(16, 20)), list(range(20, 30))]
    assert [one.model_specific_data["video_grid_thw"].tolist() for one in found] == grids[:, None].tolist()
    assert [one.model_specific_data["second_per_grid_ts"] for one in found] == [[1.0], [2.0], [3.0]]
    for alone in (bundle([(1, 4)], video_grid_thw=grids[:1]), bundle([(1, 4), (5, 6)], video_grid_thw=grids)):
        assert list(single_items(alone)) == [alone]


def test_clips_have_their_lengths() -> None:
    """SGLang leaves all with the first. Too few would end its scheduler; models without lengths have none."""
    clips = [bundle([(1, 2)], **{LENGTHS: np.array([2, 3])}), bundle([(4, 6)])]
    share_lengths(clips)
    assert [one.model_specific_data[LENGTHS].tolist() for one in clips] == [[2], [3]]
    with pytest.raises(ValueError, match="1 lengths of 2 audio clips"):
        share_lengths(clips)
    plain = [bundle([(1, 2)]), bundle([(4, 6)])]
    share_lengths(plain)
    assert [one.model_specific_data for one in plain] == [{}, {}]


def test_arguments_about_media_differ_by_their_values() -> None:
    """Not by those that choose a video's frames, of which it gets the ones that it is to have."""
    assert (
        media_settings({}) == media_settings({"mm_process_config": {"video": {"fps": 2, "nframes": 4}}}) == ""
    )
    small = media_settings({"mm_process_config": {"image": {"max_pixels": 784}, "video": {"fps": 2}}})
    assert small == media_settings({"mm_process_config": {"image": {"max_pixels": 784}}})
    assert small != media_settings({"mm_process_config": {"video": {"max_pixels": 784}}})
