"""Validation of an adapter's two files in PEFT's layout, and its rank."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headwater.engines.lora_files.errors import LoraError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")

CONFIG_BYTES_MAX = 1 << 20
HEADER_BYTES_MAX = 64 << 20
"""Of an adapter's safetensors file."""
CHUNK_BYTES = 1 << 20


class Peft(NamedTuple):
    """An adapter's configuration. `base` is the model it was trained on, as its author named it, or empty."""

    rank: int
    base: str


def no_weights(source: str, seen: list[str]) -> LoraError:
    """The error for a source without `WEIGHTS`; `seen` are names of its other files, where known."""
    pickled = sorted(name for name in seen if name.startswith("adapter_") and name.endswith(PICKLED))
    if pickled:
        return LoraError(
            400,
            f"{source} has its weights in {pickled[0]}, which may run code when loaded: rejected. "
            f"Save them as {WEIGHTS}",
        )
    return LoraError(404, f"{source} has no {WEIGHTS} (weights are accepted as safetensors only)")


def read(folder: Path) -> Peft:
    """Check both files. Raises `LoraError` 400."""
    config = _config(folder / CONFIG)
    if config.get("peft_type", "LORA") != "LORA":
        raise LoraError(400, f"{CONFIG} is of a {config['peft_type']!r} adapter, not LoRA")
    ranks = [config.get("r"), *_patterns(config.get("rank_pattern"))]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise LoraError(400, f"{CONFIG} has no valid rank: r = {config.get('r')!r}")
    rank = max(ranks)
    found = _rank_of_weights(folder / WEIGHTS)
    if found > rank:
        raise LoraError(400, f"{CONFIG} says rank {rank}, and {WEIGHTS} has matrices of rank {found}")
    base = config.get("base_model_name_or_path")
    return Peft(rank, base if isinstance(base, str) else "")


def digest(folder: Path) -> str:
    """SHA-256 over names and contents of both files."""
    whole = hashlib.sha256()
    for name in FILES:
        one = hashlib.sha256()
        with (folder / name).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                one.update(chunk)
        whole.update(name.encode() + b"\0" + one.digest())
    return whole.hexdigest()


def same_base(base: str, names: tuple[str, ...]) -> bool:
    """Is `base` one of these models? Compares the last part of the name: hubs and folders have different prefixes."""
    last = base.rstrip("/").rpartition("/")[2].lower()
    return not last or last in {name.rstrip("/").rpartition("/")[2].lower() for name in names}


def _config(path: Path) -> dict[str, Any]:
    if path.stat().st_size > CONFIG_BYTES_MAX:
        raise LoraError(400, f"{CONFIG} is larger than {CONFIG_BYTES_MAX >> 20} MiB")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise LoraError(400, f"{CONFIG} is not readable: {error}") from error


def _patterns(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


def _rank_of_weights(path: Path) -> int:
    """The largest rank among the A matrices (rank × inputs). Also checks that it is a safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
            raise LoraError(400, f"{WEIGHTS} is not a safetensors file")
        header = file.read(length)
    rank = 0
    try:
        for name, tensor in msgspec.json.decode(header, type=dict[str, dict[str, Any]]).items():
            if name == "__metadata__":
                continue
            _, end = tensor["data_offsets"]
            if not 0 <= end <= size - 8 - length:
                raise LoraError(400, f"{WEIGHTS} is truncated")
            if ".lora_A" in name:
                rank = max(rank, int(tensor["shape"][0]))
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise LoraError(400, f"{WEIGHTS} is not a safetensors file: {error}") from error
    if not rank:
        raise LoraError(400, f"{WEIGHTS} has no LoRA matrices")
    return rank
