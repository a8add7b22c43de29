"""In SGLang's scheduler process: counts the images that it encodes, and writes down the embedding of the probe.

SGLang reports neither. The function that is wrapped here gets the one that encodes as an argument; a release without it leaves no count, and the
worker, which looks for it at its start, does not start then.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from headwater.engines.embeddings import files as embedding_files
from headwater.engines.media.probe import PROBE_ID

VARIABLE: Final = "HEADWATER_EMBEDDINGS_FOLDER"
"""Environment variable with the folder of counts, for the engine's processes."""

ID_DIGITS: Final = 16
"""Hexadecimal digits of an image's id that SGLang uses: 64 bits."""


@contextlib.contextmanager
def announced(folder: Path | None) -> Iterator[None]:
    """Processes that are started within it count in this folder, unless it is None."""
    if folder is None:
        yield
        return
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def install() -> None:
    """In the scheduler's process, before it loads its model: count, if this was announced."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    from sglang.srt.managers import mm_utils

    if hasattr(mm_utils, "get_embedding_and_mask"):
        mm_utils.get_embedding_and_mask = counting(mm_utils.get_embedding_and_mask, Path(folder))


def counting(embed: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """`embed`, SGLang's `get_embedding_and_mask`, with a `data_embedding_func` that counts."""

    def embed_and_count(*arguments: Any, data_embedding_func: Any, **named: Any) -> Any:
        @functools.wraps(data_embedding_func)
        def encode(items: list[Any]) -> Any:
            found = data_embedding_func(items)
            # A count that cannot be written must not end the engine.
            with contextlib.suppress(OSError):
                for item in items:
                    embedding_files.count(folder, embedding_files.ENCODED)
                    if len(items) == 1 and item.hash == int(PROBE_ID[:ID_DIGITS], 16):
                        tensor = found[0] if isinstance(found, list) else found
                        tensor = tensor.reshape(-1, tensor.shape[-1])
                        embedding_files.write(folder, PROBE_ID, tensor.detach().cpu())
            return found

        # SGLang looks at the owner of the function.
        owner = getattr(data_embedding_func, "__self__", None)
        if owner is not None:
            encode.__self__ = owner  # type: ignore[attr-defined]  # as a method has it
        return embed(*arguments, data_embedding_func=encode, **named)

    return embed_and_count
