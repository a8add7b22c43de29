"""A small model's folder, and the surroundings of a process that downloads."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from headwater.engines.vllm.preload import OFFLINE
from tests.support.servers.hub import Hub, hub

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder as published ones look: weights in two formats, pictures, pages, a copy in its maker's layout."""
    made = tmp_path / "published"
    header = json.dumps({"a": {"dtype": "U8", "shape": [300_000], "data_offsets": [0, 300_000]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(range(250)) * 1_200
    files = {
        "config.json": b'{"model_type": "llama", "vocab_size": 8}',
        "tokenizer.json": b'{"model": {}}',
        WEIGHTS: weights,
        "model.fp16.safetensors": weights,
        "pytorch_model.bin": b"other",
        "original/consolidated.00.pth": b"copy",
        "README.md": b"# A model",
        "onnx/model.onnx": b"another",
    }
    for name, data in files.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(data)
    return made


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub without a model, and a cache without a file."""
    with hub() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        # In this process the library has read its environment already.
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        # The last two may be left by a test that imported an engine into this process, which then starts others.
        for name in ("HF_HUB_CACHE", "HF_TOKEN", *OFFLINE):
            monkeypatch.delenv(name, raising=False)
        yield made


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """What the library keeps of acme/small."""
    return tmp_path / "hf" / "hub" / "models--acme--small"
