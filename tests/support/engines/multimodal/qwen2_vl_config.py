"""The parts of a Qwen2-VL configuration that the models of the tests have in common, in Hugging Face's format."""

from collections.abc import Mapping
from typing import Any, Final

PATCH: Final = 14
MERGE: Final = 2
MEAN_AND_DEVIATION: Final = [0.5, 0.5, 0.5]


def token_fields(ids: Mapping[str, int]) -> dict[str, int]:
    """The fields of `config.json` that name the special tokens, by their ids."""
    return {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def vision_config(*, layers: int, width: int, inner: int, hidden: int) -> dict[str, Any]:
    """The vision tower: `layers` of `width` with an MLP of `inner`, whose embeddings have the text model's `hidden` size."""
    return {
        "depth": layers,
        "embed_dim": width,
        "hidden_size": hidden,
        "mlp_ratio": inner // width,
        "num_heads": 2,
        "in_chans": 3,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "model_type": "qwen2_vl",
    }


def processor_config(*, pixels_max: int) -> dict[str, Any]:
    """`preprocessor_config.json`."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "min_pixels": 28 * 28 * 4,
        "max_pixels": pixels_max,
        "image_mean": MEAN_AND_DEVIATION,
        "image_std": MEAN_AND_DEVIATION,
    }
