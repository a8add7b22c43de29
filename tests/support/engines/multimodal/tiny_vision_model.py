"""A vision-language model (Qwen2-VL's architecture) small enough for a CPU, whose answers depend on every pixel patch and token.

One vision layer and two language layers with random weights; the tokenizer is the small real model's with fewer tokens, and the four tokens for media.
Made once, in the user's cache folder.
"""

import json
from pathlib import Path
from typing import Any, Final

from tests.support.engines.multimodal import model_folder
from tests.support.engines.multimodal.qwen2_vl_config import (
    MERGE,
    PATCH,
    processor_config,
    token_fields,
    vision_config,
)
from tests.support.engines.short_vocabulary import SIZE

NAME: Final = "tiny-qwen2-vl-4"
HIDDEN, INNER, LAYERS, EOS = 64, 128, 2, 2
VISION, VISION_INNER = 32, 64
EOS_SCALE = 2.15
MEDIA_TOKENS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE_TOKEN: Final = SIZE + MEDIA_TOKENS.index("<|image_pad|>")
MAX_PIXELS: Final = 28 * 28 * 64
TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def ensure() -> Path:
    """The model's folder."""
    return model_folder.ensure(NAME, MEDIA_TOKENS, TEMPLATE, _write)


def _write(folder: Path, ids: dict[str, int]) -> None:
    vocabulary = max(ids.values()) + 1
    _write_config(folder, vocabulary, ids)
    _write_weights(folder, vocabulary)


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
        **token_fields(ids),
        "vision_config": vision_config(layers=1, width=VISION, inner=VISION_INNER, hidden=HIDDEN),
    }
    (folder / "config.json").write_text(json.dumps(config))
    processor = processor_config(pixels_max=MAX_PIXELS)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def _write_weights(folder: Path, vocabulary: int) -> None:
    from safetensors.numpy import save_file

    draw = model_folder.Draw(7)
    weights: dict[str, Any] = {
        "model.embed_tokens.weight": draw.matrix(vocabulary, HIDDEN),
        "lm_head.weight": draw.matrix(vocabulary, HIDDEN),
        "visual.patch_embed.proj.weight": draw.matrix(VISION, 3, 2, PATCH, PATCH),
        **draw.norm("visual.merger.ln_q", VISION),
        **draw.linear("visual.merger.mlp.0", VISION * MERGE**2, VISION * MERGE**2),
        **draw.linear("visual.merger.mlp.2", HIDDEN, VISION * MERGE**2),
    }
    weights["lm_head.weight"][EOS] *= EOS_SCALE
    # A prompt with an answer so far that has one would lack its item.
    weights["lm_head.weight"][SIZE:] = 0
    block = "visual.blocks.0"
    for name in ("norm1", "norm2"):
        weights |= draw.norm(f"{block}.{name}", VISION)
    for name, rows, columns in (
        ("attn.qkv", 3 * VISION, VISION),
        ("attn.proj", VISION, VISION),
        ("mlp.fc1", VISION_INNER, VISION),
        ("mlp.fc2", VISION, VISION_INNER),
    ):
        weights |= draw.linear(f"{block}.{name}", rows, columns)
    decoder = draw.decoder(LAYERS, HIDDEN, INNER)
    weights |= {f"model.{name}": value for name, value in decoder.items()}
    save_file(weights, folder / "model.safetensors")
