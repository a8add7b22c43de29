"""A vision-language model (Qwen2-VL's architecture) small enough for a CPU, whose answers depend on every pixel patch and token.

One vision layer and two language layers with random weights; the tokenizer is the small real model's with the four tokens for media.
Made once, in the user's cache folder.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from headwater.ops.worker import default_model

NAME: Final = "tiny-qwen2-vl-1"
HIDDEN, INNER, LAYERS, EOS = 64, 128, 2, 2
VISION, VISION_INNER, PATCH, MERGE = 32, 64, 14, 2
SCALE = 0.3
EOS_SCALE = 2.5
MEDIA_TOKENS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
MAX_PIXELS: Final = 28 * 28 * 64
TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def ensure() -> Path:
    """The model's folder."""
    source = default_model.ensure()
    folder = source.parent / NAME
    if folder.is_dir():
        return folder
    making = Path(tempfile.mkdtemp(prefix=f"{NAME}-", dir=source.parent))
    first = _write_tokenizer(source, making)
    ids = {name: first + place for place, name in enumerate(MEDIA_TOKENS)}
    vocabulary = first + len(MEDIA_TOKENS)
    _write_config(making, vocabulary, ids)
    _write_weights(making, vocabulary)
    try:
        os.rename(making, folder)
    except OSError:
        # Another test process was faster.
        shutil.rmtree(making)
    return folder


def _write_tokenizer(source: Path, folder: Path) -> int:
    """The tokenizer with the tokens for media; returns the first one's id."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    known: list[int] = [
        *tokenizer["model"]["vocab"].values(),
        *(one["id"] for one in tokenizer["added_tokens"]),
    ]
    first = max(known) + 1
    for place, name in enumerate(MEDIA_TOKENS):
        tokenizer["added_tokens"].append(
            {
                "id": first + place,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    decoder = settings.setdefault("added_tokens_decoder", {})
    for place, name in enumerate(MEDIA_TOKENS):
        decoder[str(first + place)] = {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return first


def _write_config(folder: Path, vocabulary: int, ids: dict[str, int]) -> None:
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": vocabulary,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "depth": 1,
            "embed_dim": VISION,
            "hidden_size": HIDDEN,
            "mlp_ratio": VISION_INNER // VISION,
            "num_heads": 2,
            "in_chans": 3,
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "model_type": "qwen2_vl",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "min_pixels": 28 * 28 * 4,
        "max_pixels": MAX_PIXELS,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def _write_weights(folder: Path, vocabulary: int) -> None:
    # Not torch: its threads would be missing in the engines that are forked from this process, which wait for them.
    import numpy as np
    from safetensors.numpy import save_file

    draw = np.random.default_rng(7)

    def matrix(*shape: int) -> Any:
        return (draw.standard_normal(shape) * SCALE).astype(np.float32)

    def ones(size: int) -> Any:
        return np.ones(size, np.float32)

    def zeros(size: int) -> Any:
        return np.zeros(size, np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, HIDDEN),
        "lm_head.weight": matrix(vocabulary, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
        "visual.patch_embed.proj.weight": matrix(VISION, 3, 2, PATCH, PATCH),
        "visual.merger.ln_q.weight": ones(VISION),
        "visual.merger.ln_q.bias": zeros(VISION),
        "visual.merger.mlp.0.weight": matrix(VISION * MERGE**2, VISION * MERGE**2),
        "visual.merger.mlp.0.bias": zeros(VISION * MERGE**2),
        "visual.merger.mlp.2.weight": matrix(HIDDEN, VISION * MERGE**2),
        "visual.merger.mlp.2.bias": zeros(HIDDEN),
    }
    weights["lm_head.weight"][EOS] *= EOS_SCALE
    block = "visual.blocks.0"
    for name in ("norm1", "norm2"):
        weights[f"{block}.{name}.weight"], weights[f"{block}.{name}.bias"] = ones(VISION), zeros(VISION)
    for name, rows, columns in (
        ("attn.qkv", 3 * VISION, VISION),
        ("attn.proj", VISION, VISION),
        ("mlp.fc1", VISION_INNER, VISION),
        ("mlp.fc2", VISION, VISION_INNER),
    ):
        weights[f"{block}.{name}.weight"], weights[f"{block}.{name}.bias"] = (
            matrix(rows, columns),
            zeros(rows),
        )
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{at}.self_attn.{name}.weight"] = matrix(HIDDEN, HIDDEN)
            weights[f"{at}.self_attn.{name}.bias"] = zeros(HIDDEN)
        weights[f"{at}.self_attn.o_proj.weight"] = matrix(HIDDEN, HIDDEN)
        weights[f"{at}.mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{at}.mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{at}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        weights[f"{at}.input_layernorm.weight"] = ones(HIDDEN)
        weights[f"{at}.post_attention_layernorm.weight"] = ones(HIDDEN)
    save_file(weights, folder / "model.safetensors")
