"""Which models' images are not even tried with SGLang; what the others do is tested with the real one."""

from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from headwater.engines.kv_events.sentinels import ImageSentinels
from headwater.engines.sglang.config.signatures import LACKS, Signatures
from headwater.engines.sglang.images import learn_images

VISION = SimpleNamespace(image_token_id=9)
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
        (object(), VISION, {}, BEFORE, "before 0.5.23 SGLang distinguishes images by 30 bits"),
        (object(), VISION, {}, NOW, "AttributeError"),
    ],
)
async def test_these_serve_text_only(
    processor: Any, model: Any, config: Any, lacks: Any, reason: str
) -> None:
    """Text models silently. A release that would confuse images, and a processor that fails, with the reason."""
    manager = SimpleNamespace(mm_processor=processor, model_config=SimpleNamespace(hf_config=model))
    with capture_logs() as logs:
        found = await learn_images(
            manager, {"model_path": "m", **config}, Signatures(lacks), ImageSentinels(9)
        )
    assert found is None
    assert [(one["event"], one["reason"].startswith(reason)) for one in logs] == (
        [("media_not_served", True)] if reason else []
    )
