"""Models of Qwen2-VL's and Qwen2.5-VL's architecture without weights: serve them with vLLM's `--load-format dummy`.

What it answers means nothing, but its kernels and times are real.
"""

import json
from pathlib import Path
from typing import Any, Final

from tests.bench.gpu import model as gpu_model

SPECIAL: Final = (*gpu_model.SPECIAL, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

LANGUAGE_7B: Final[dict[str, Any]] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
LANGUAGE_TINY: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "dtype": "float32",
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
}
"""The language models, which both families share."""

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "qwen2-vl-7b": {
        **LANGUAGE_7B,
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 3584,
            "mlp_ratio": 4,
            "num_heads": 16,
        },
    },
    "qwen2.5-vl-7b": {
        "model_type": "qwen2_5_vl",
        **LANGUAGE_7B,
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "out_hidden_size": 3584,
            "intermediate_size": 3420,
            "num_heads": 16,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
    "tiny": {
        **LANGUAGE_TINY,
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2},
    },
    # For fleets without GPUs: an image of 504 x 504 pixels takes a core about half a second, and a token next to nothing.
    "small-encoder": {
        **LANGUAGE_TINY,
        "vision_config": {"depth": 8, "embed_dim": 512, "hidden_size": 64, "mlp_ratio": 4, "num_heads": 8},
    },
    "tiny-2.5": {
        "model_type": "qwen2_5_vl",
        **LANGUAGE_TINY,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
    },
}

FAMILIES: Final = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "Qwen2VLProcessor", {"spatial_patch_size": 14}),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLProcessor", {"tokens_per_second": 2}),
}
"""Architecture, processor and further settings of the vision encoder, by `model_type`."""

TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)


def make(folder: Path, shape: str) -> Path:
    """Write config, processor, tokenizer and template into `folder`."""
    ids = {name: SPECIAL.index(name) for name in SPECIAL}
    sizes = {"model_type": "qwen2_vl", **SHAPES[shape]}
    family = sizes["model_type"]
    architecture, processor_class, vision_settings = FAMILIES[family]
    vision = {
        "in_channels": 3,
        "in_chans": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "model_type": family,
        **vision_settings,
        **sizes["vision_config"],
    }
    config = {
        "architectures": [architecture],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        **sizes,
        "vision_config": vision,
    }
    gpu_model.write(folder, config, SPECIAL)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor_class,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
