"""A vision-language model that names colours: the small real model's text weights, and a vision tower written by hand.

Its architecture is Qwen2-VL's, which reduces to Llama's where the biases of queries, keys and values are zero, and all of a token's positions
are equal. Each square of 28 pixels becomes the embedding of the word for its colour, by a closed form:

* the patch embedding is the mean of each colour channel c over the patch and its copy in time, in -1…1, as the pair (c, -c);
* the vision layer adds nothing; the merger's norm scales these six numbers to one length, so that a darker colour has the same direction;
* its first layer has a unit for each corner of the colour cube, the second copies the embedding of the active units' word.

Made once, in the user's cache folder.
"""

import json
from pathlib import Path
from typing import Any, Final

from headwater.ops.start import model
from tests.support.engines.multimodal import model_folder
from tests.support.engines.multimodal.qwen2_vl_config import (
    MERGE,
    PATCH,
    processor_config,
    token_fields,
    vision_config,
)

NAME: Final = "colour-smollm2-1"
COLOURS: Final = {
    "black": (0, 0, 0),
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "purple": (255, 0, 255),
    "white": (255, 255, 255),
}
"""The corners of the colour cube with an English word of one token, 8-bit RGB."""

VISION, LAYERS = 32, 1
SHARPNESS: Final = 16.0
"""By which inactive units are pressed to zero: GELU of minus this much, and less."""

MAX_PIXELS: Final = 28 * 28 * 64
MEDIA_TOKENS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def ensure() -> Path:
    """The model's folder, 270 MB."""
    return model_folder.ensure(NAME, MEDIA_TOKENS, TEMPLATE, _write, short=False)


def _write(folder: Path, ids: dict[str, int]) -> None:
    text = json.loads((model.ensure() / "config.json").read_text())
    _write_config(folder, text, ids)
    _write_weights(folder, text, ids)


def _write_config(folder: Path, text: dict[str, Any], ids: dict[str, int]) -> None:
    half = text["head_dim"] // 2
    kept = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
    )
    config = {name: text[name] for name in kept} | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "rope_theta": text["rope_parameters"]["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": [half // 2, half // 4, half // 4]},
        "use_sliding_window": False,
        "vocab_size": max(ids.values()) + 1,
        "dtype": "float32",
        **token_fields(ids),
        "vision_config": vision_config(layers=LAYERS, width=VISION, inner=VISION, hidden=text["hidden_size"]),
    }
    (folder / "config.json").write_text(json.dumps(config))
    processor = processor_config(pixels_max=MAX_PIXELS)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def _write_weights(folder: Path, text: dict[str, Any], ids: dict[str, int]) -> None:
    """The text model's bytes as they are, in bfloat16, and what it lacks, in float32."""
    import numpy as np

    stored = _read_safetensors(model.path() / "model.safetensors")
    words = stored["model.embed_tokens.weight"]
    hidden, known = text["hidden_size"], text["vocab_size"]
    # bfloat16 is the upper half of float32.
    upper = np.frombuffer(words["data"], np.uint16).reshape(known, hidden)
    embeddings = (upper.astype(np.uint32) << 16).view(np.float32)
    # The tokens around an image say nothing.
    more = bytes(2 * hidden * (max(ids.values()) + 1 - known))
    words |= {"data": words["data"] + more, "shape": [max(ids.values()) + 1, hidden]}
    tokenizer = json.loads((model.path() / "tokenizer.json").read_text())["model"]["vocab"]
    named = {name: embeddings[tokenizer[f"Ġ{name}"]] for name in COLOURS}
    added = _vision_tower(named, hidden)
    for layer in range(text["num_hidden_layers"]):
        for name, heads in (
            ("q", "num_attention_heads"),
            ("k", "num_key_value_heads"),
            ("v", "num_key_value_heads"),
        ):
            added[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = np.zeros(
                text["head_dim"] * text[heads], np.float32
            )
    stored |= {
        name: {"dtype": "F32", "shape": list(value.shape), "data": value.tobytes()}
        for name, value in added.items()
    }
    _write_safetensors(folder / "model.safetensors", stored)


def _read_safetensors(file: Path) -> dict[str, dict[str, Any]]:
    """Tensors by name, as `_write_safetensors` takes them."""
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    return {
        name: one | {"data": content[begin + one["data_offsets"][0] : begin + one["data_offsets"][1]]}
        for name, one in header.items()
        if name != "__metadata__"
    }


def _write_safetensors(file: Path, tensors: dict[str, dict[str, Any]]) -> None:
    """Tensors by name: `dtype` as safetensors spells it, `shape` and `data`. NumPy has no bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, one in tensors.items():
        begin, end = end, end + len(one["data"])
        header[name] = {"dtype": one["dtype"], "shape": one["shape"], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for one in tensors.values():
            out.write(one["data"])


def _vision_tower(words: dict[str, Any], hidden: int) -> dict[str, Any]:
    """Its weights, given the embedding of each colour's word: arrays of `hidden` float32."""
    import numpy as np

    def zeros(*shape: int) -> Any:
        return np.zeros(shape, np.float32)

    draw = model_folder.Draw(0)
    patches, merged = zeros(VISION, 3, 2, PATCH, PATCH), VISION * MERGE**2
    for channel in range(3):
        patches[2 * channel, channel] = 1 / (2 * PATCH**2)
        patches[2 * channel + 1, channel] = -1 / (2 * PATCH**2)
    weights = {"visual.patch_embed.proj.weight": patches, **draw.norm("visual.merger.ln_q", VISION)}
    for name, rows, columns in (
        ("attn.qkv", 3 * VISION, VISION),
        ("attn.proj", VISION, VISION),
        ("mlp.fc1", VISION, VISION),
        ("mlp.fc2", VISION, VISION),
    ):
        weights[f"visual.blocks.0.{name}.weight"] = zeros(rows, columns)
        weights[f"visual.blocks.0.{name}.bias"] = zeros(rows)
    for name in ("norm1", "norm2"):
        weights |= draw.norm(f"visual.blocks.0.{name}", VISION)
    # The norm of a corner of the cube: each of its six numbers is this or minus this.
    size = (VISION / 6) ** 0.5
    first, bias, second = zeros(merged, merged), zeros(merged), zeros(hidden, merged)
    for unit, (name, colour) in enumerate(COLOURS.items()):
        corner = np.array([1 if value else -1 for value in colour], np.float32)
        for patch in range(MERGE**2):
            first[unit, patch * VISION : patch * VISION + 6 : 2] = corner * SHARPNESS / (size * MERGE**2)
        # Of its own corner the sum is three times the sharpness, of the next ones once.
        bias[unit] = -2 * SHARPNESS
        second[:, unit] = words[name] / SHARPNESS
    return weights | {
        "visual.merger.mlp.0.weight": first,
        "visual.merger.mlp.0.bias": bias,
        "visual.merger.mlp.2.weight": second,
        "visual.merger.mlp.2.bias": zeros(hidden),
    }
