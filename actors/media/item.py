"""A decoded item, and its id: a hash of what the model sees, whatever file, URL or metadata it came from."""

from contextlib import suppress
from hashlib import blake2b
from math import prod
from mmap import ACCESS_READ, mmap
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.actors.media.request import MediaKind

ID_BYTES: Final = 16

ITEM_BYTES: Final = {"uint8": 1, "float32": 4, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of one value by type."""

_ARRAY_TYPES: Final[dict[str, Any]] = {
    "uint8": np.uint8,
    "float32": np.float32,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
}


class MediaItem(NamedTuple):
    """A checked, decoded item. Its values lie in shared memory that nothing can change, and that ends with the last user.

    `id`: 32 hexadecimal digits, see `media_id`. `dtype` and `shape` by kind:

    * image: uint8 (height, width, 3), RGB, upright, transparency over white
    * audio: float32 (samples,), mono, at the target's rate
    * video: uint8 (frames, height, width, 3)
    * embedding: F32, F16 or BF16 (tokens, width)
    * file: uint8 (bytes,), text in UTF-8. A file that is an image is of kind image, with the same id

    `format` is the file's (`png`, `mp4`, `pdf`). `seconds` is the length of audio or video, `times_s` are those of the frames,
    `grid` is that of an embedding's patches (1, rows, columns), where the model has such a one.
    """

    kind: MediaKind
    id: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    format: str
    seconds: float = 0.0
    times_s: tuple[float, ...] = ()
    grid: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """The width of an image or a video's frames, in pixels; of an embedding, in values."""
        return self.shape[-2] if self.dtype == "uint8" else self.shape[-1]

    @property
    def height(self) -> int:
        """The height of an image or a video's frames, in pixels."""
        return self.shape[-3]

    def array(self) -> NDArray[Any]:
        """The values without a copy, read-only. NumPy has no BF16: such values are uint16 with their bits."""
        return np.frombuffer(self.data, _ARRAY_TYPES[self.dtype]).reshape(self.shape)


def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array that is not empty. Raises `ValueError` for an unknown type, and for extents below 1."""
    if dtype not in ITEM_BYTES or min(shape, default=0) < 1:
        raise ValueError(f"no array: {dtype} {shape}")
    return ITEM_BYTES[dtype] * prod(shape)


def media_id(
    kind: MediaKind, dtype: str, shape: tuple[int, ...], data: memoryview | bytes, processor: str
) -> str:
    """The id of an item: BLAKE2b of 128 bits over its kind, type, shape, the processor's settings and all values.

    Equal ids mean that the model sees the same, so cached blocks may be used again. Without a key: caches are kept apart
    between tenants by the salt of their block hashes. About 1 s per GB, during which other threads run.
    """
    head = "\0".join([kind, dtype, ",".join(map(str, shape)), processor]).encode()
    digest = blake2b(len(head).to_bytes(8, "little") + head, digest_size=ID_BYTES, person=b"headwater-media")
    digest.update(data)
    return digest.hexdigest()


class MemoryBudget:
    """Bytes of decoded items that may be in use at once. Safe to use from several threads."""

    def __init__(self, bytes_max: int) -> None:
        self._free = bytes_max
        self._lock = Lock()

    def take(self, size: int) -> bool:
        """Count an item, if there is room for it."""
        with self._lock:
            if size > self._free:
                return False
            self._free -= size
            return True

    def give_back(self, size: int) -> None:
        """An item is no longer used."""
        with self._lock:
            self._free += size


class SharedValues(mmap):
    """Mapped values of an item. A thread unmaps them once nothing uses them: for 100 MB that takes 15 ms, too long for the
    event loop, whose thread usually drops the last reference.
    """

    budget: MemoryBudget | None = None
    """What the values are counted in."""

    def __del__(self) -> None:
        # The garbage collector may call this within any allocation, also of code that holds a lock: no lock may be taken here.
        _unused.put(self)


_unused: Final[SimpleQueue[SharedValues]] = SimpleQueue()
_unmapper: Thread | None = None


def _unmap_unused() -> None:
    while True:
        values = _unused.get()
        size, budget = len(values), values.budget
        with suppress(BufferError):
            # Part of a cycle that still has a view of it: then it is unmapped with that.
            values.close()
        del values
        if budget is not None:
            budget.give_back(size)


def _ensure_unmapper() -> None:
    """Start the thread, unless this process has it: a fork has no threads of its parent."""
    global _unmapper
    if _unmapper is None or not _unmapper.is_alive():
        _unmapper = Thread(target=_unmap_unused, name="media-unmap", daemon=True)
        _unmapper.start()


def map_values(descriptor: int, size: int, budget: MemoryBudget | None = None) -> memoryview:
    """The values behind a sealed descriptor, read-only, without a copy. The caller closes the descriptor.

    `size` has been taken from the budget, and is given back when nothing uses the values any longer.
    """
    _ensure_unmapper()
    values = SharedValues(descriptor, size, access=ACCESS_READ)
    values.budget = budget
    return memoryview(values)
