"""Identifies the weights that an engine has loaded: two engines may exchange KV only if theirs are equal."""

from hashlib import blake2b
from pathlib import Path

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


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
