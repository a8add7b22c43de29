"""What a model is: two folders have the same identity if they hold the same model, wherever they are and however they are called."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.engines.model_files import read_model_files

ROWS = 4096
"""Bytes of a tensor here."""

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 9}
TENSORS = {"embed": b"\1" * ROWS, "layer": b"\2" * ROWS, "head": b"\3" * ROWS}


def safetensors(tensors: dict[str, bytes], dtype: str = "U8") -> bytes:
    """A file in safetensors' layout."""
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": dtype, "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def make_folder(folder: Path) -> Path:
    """A model in Hugging Face's layout, with its weights in two files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}", "eos_token": "a"}')
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    first, *rest = TENSORS
    (folder / "model-00001-of-00002.safetensors").write_bytes(safetensors({first: TENSORS[first]}))
    others = {name: TENSORS[name] for name in rest}
    (folder / "model-00002-of-00002.safetensors").write_bytes(safetensors(others))
    return folder


def identity(folder: Path) -> str:
    """As the worker of the folder reports it."""
    return read_model_files(folder).identity


def rewrite(name: str, content: bytes) -> Callable[[Path], object]:
    """Another file of this name."""
    return lambda folder: (folder / name).write_bytes(content)


def test_a_copy_is_the_same_model(tmp_path: Path) -> None:
    """Neither the path nor the times of its files are part of what a model is."""
    one, other = make_folder(tmp_path / "a" / "default"), make_folder(tmp_path / "b" / "mine")
    assert identity(one) == identity(other)
    assert len(identity(one)) == 64


@pytest.mark.parametrize(
    "change",
    [
        rewrite("chat_template.jinja", b"{{ other }}"),
        rewrite("generation_config.json", b'{"temperature": 1.0}'),
        rewrite("preprocessor_config.json", b'{"max_pixels": 784}'),
        rewrite("README.md", b"words"),
        rewrite(".cache", b"words"),
        rewrite("config.json", json.dumps(dict(reversed(CONFIG.items())), indent=2).encode()),
    ],
    ids=["template", "defaults", "media", "readme", "hidden", "order"],
)
def test_what_the_weights_do_not_depend_on_is_no_part_of_it(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    """Templates, defaults and settings of media may be changed one worker after the other."""
    one, other = make_folder(tmp_path / "one"), make_folder(tmp_path / "other")
    change(other)
    assert identity(one) == identity(other)


@pytest.mark.parametrize(
    "change",
    [
        rewrite("config.json", json.dumps({**CONFIG, "rope_theta": 5}).encode()),
        rewrite("tokenizer.json", b'{"model": {"vocab": {"b": 0}}}'),
        rewrite("model-00001-of-00002.safetensors", safetensors({"embed": b"\4" * ROWS})),
        rewrite("model-00001-of-00002.safetensors", safetensors({"embed": TENSORS["embed"]}, "I8")),
        rewrite("model-00001-of-00002.safetensors", safetensors({"embed": b"\1" * 2 * ROWS})),
        rewrite("model-00003-of-00003.safetensors", safetensors({"more": b"\1"})),
        lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
    ],
    ids=["config", "tokenizer", "values", "dtype", "size", "another file", "a file less"],
)
def test_other_weights_or_another_tokenizer_are_another_model(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    """Also weights of the same names, shapes and sizes, as each fine-tuning has."""
    one, other = make_folder(tmp_path / "one"), make_folder(tmp_path / "other")
    change(other)
    assert identity(one) != identity(other)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.gguf", "unet/diffusion_pytorch_model.safetensors"]
)
def test_weights_of_every_format_count(tmp_path: Path, name: str) -> None:
    """Also those in the folder of a part."""
    folders = [make_folder(tmp_path / which) for which in ("one", "other", "same")]
    for folder, content in zip(folders, (b"\1", b"\2", b"\1"), strict=True):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content * ROWS)
    one, other, same = map(identity, folders)
    assert one == same != other


def test_the_weights_are_not_read_whole(tmp_path: Path) -> None:
    """Of 64 GiB only parts are read: the file has holes, and reading all of them would take minutes."""
    folder = make_folder(tmp_path / "large")
    with (folder / "model-00003-of-00003.safetensors").open("wb") as file:
        file.write(safetensors({"more": b""}))
        file.truncate(64 << 30)
    before = identity(folder)
    with (folder / "model-00003-of-00003.safetensors").open("r+b") as file:
        file.truncate((64 << 30) + 1)
    assert identity(folder) != before
