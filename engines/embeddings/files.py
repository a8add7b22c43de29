"""Embeddings as files in a folder that a worker shares with its engine's processes: safetensors, one tensor per file.

The worker and the processes of its engine are on one machine, and the folder is in memory where the system has such a one. A file
appears whole or not at all.
"""

import os
from pathlib import Path
from typing import Any, Final

from headwater.engines.process import private_folder

TENSOR: Final = "embedding"
SUFFIX: Final = ".safetensors"
ENCODED: Final = "encoded"
LOADED: Final = "loaded"
SHARED_MEMORY: Final = Path("/dev/shm")


class FileShelf:
    """Embeddings of an `EmbeddingStore` as files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, identifier: str, tensor: Any) -> None:
        """See `Shelf.write`."""
        write(self.folder, identifier, tensor)

    def remove(self, identifier: str) -> None:
        """See `Shelf.remove`."""
        path_of(self.folder, identifier).unlink(missing_ok=True)

    def close(self) -> None:
        """See `Shelf.close`."""
        private_folder.give_up(self.folder)


def make_folder() -> Path:
    """A new private folder, in memory if possible."""
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    return private_folder.take("embeddings", parent)


def path_of(folder: Path, identifier: str) -> Path:
    """The file of one item. Identifiers are hexadecimal digits, perhaps with a prefix of vLLM's for a LoRA adapter."""
    return folder / (identifier.replace("/", "_").replace("\0", "_") + SUFFIX)


def write(folder: Path, identifier: str, tensor: Any) -> None:
    """Write a torch tensor: under another name first."""
    from safetensors.torch import save_file

    final = path_of(folder, identifier)
    draft = final.with_suffix(f".{os.getpid()}")
    save_file({TENSOR: tensor.contiguous()}, draft)
    os.replace(draft, final)


def read(folder: Path, identifier: str, device: str = "cpu") -> Any:
    """The tensor of an item. Raises FileNotFoundError."""
    from safetensors.torch import load_file

    return load_file(path_of(folder, identifier), device=device)[TENSOR]


def take(folder: Path, identifier: str) -> Any:
    """The tensor of an item, whose file is removed. Raises FileNotFoundError."""
    tensor = read(folder, identifier)
    path_of(folder, identifier).unlink()
    return tensor


def count(folder: Path, what: str) -> None:
    """Count something that the engine process did: a byte per time, in a file that the worker reads."""
    with open(folder / what, "ab") as file:
        file.write(b".")


def counted(folder: Path, what: str) -> int:
    """How often it was counted."""
    try:
        return (folder / what).stat().st_size
    except FileNotFoundError:
        return 0
