"""The folder of a pipeline in diffusers' layout. Light to import."""

from pathlib import Path
from typing import Final

from headwater.engines.engine import EngineUnavailable

INDEX: Final = "model_index.json"
TOKENIZERS: Final = ("tokenizer", "tokenizer_2", "tokenizer_3")


def pipeline_folder(model: str) -> Path:
    """The folder that `--model` names. Raises `EngineUnavailable`."""
    folder = Path(model).expanduser()
    if not model or not (folder / INDEX).is_file():
        raise EngineUnavailable(
            f"this engine needs --model with a pipeline's folder in diffusers' layout; {model or 'none'} has no {INDEX}"
        )
    return folder


def tokenizer_of(folder: Path) -> bytes:
    """The tokenizer.json of the pipeline's first fast tokenizer, b"" if it has none."""
    for part in TOKENIZERS:
        path = folder / part / "tokenizer.json"
        if path.is_file():
            return path.read_bytes()
    return b""
