"""Digests of a model's files: what a model is, wherever its folder lies, and which weights an engine has loaded."""

import json
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Final

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")

SAMPLES_MAX: Final = 1_024
SAMPLE_BYTES: Final = 4_096
"""Weights are sampled: at most so many pieces of this size, spread evenly over all of them."""

HEADER_BYTES_MAX: Final = 1 << 20
"""Read from the beginning of each file of weights: names, types and shapes of its tensors."""


def model_digest(model: str) -> str:
    """Digest over a model's path, configuration and weights. Files of the same names and sizes are assumed to be equal."""
    digest = blake2b(model.encode(), digest_size=6)
    folder = Path(model)
    if (folder / "config.json").is_file():
        digest.update((folder / "config.json").read_bytes())
    for pattern in _WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()


def content_digest(folder: Path) -> str:
    """What a model is: SHA-256, in hex, over its configuration, its tokenizer and its weights, and not over its path or its templates.

    Of weights it reads names, sizes, headers and samples, some megabytes in all. A change between two samples is not seen; fine-tuning
    changes nearly every value.
    """
    digest = sha256()
    try:
        # However it is written.
        config = json.dumps(json.loads((folder / "config.json").read_bytes()), sort_keys=True)
    except (OSError, ValueError):
        config = ""
    digest.update(f"{config}\n".encode())
    tokenizer = folder / "tokenizer.json"
    digest.update(sha256(tokenizer.read_bytes()).digest() if tokenizer.is_file() else b"")
    files = sorted({path for pattern in _WEIGHTS for path in folder.rglob(pattern) if path.is_file()})
    step = max(SAMPLE_BYTES, sum(path.stat().st_size for path in files) // SAMPLES_MAX)
    for path in files:
        size = path.stat().st_size
        digest.update(f"\n{path.relative_to(folder)} {size}\n".encode(errors="surrogateescape"))
        with path.open("rb") as file:
            digest.update(file.read(HEADER_BYTES_MAX))
            for at in range(0, size, step):
                file.seek(at)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
