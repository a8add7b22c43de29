"""The bytes of a slab: host memory, or a torch tensor on a GPU.

Tests cover `HostMemory` and `TensorMemory` over a CPU tensor; CUDA memory differs only in `kind` and `device`.
"""

import math
import mmap
from typing import Any, Final, NamedTuple, Protocol, cast, get_args

import numpy as np

from headwater.engines.transfer.port import Bytes, checksum, copy_checked
from headwater.schemas.messages.transfer import DType, MemoryKind, Offer

ITEM_BYTES: Final[dict[DType, int]] = {
    name: 2 if name == "bfloat16" else np.dtype(name).itemsize for name in get_args(DType)
}


class Form(NamedTuple):
    """Type of elements, and shape."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Memory(Protocol):
    """A buffer at a fixed address. Methods take offsets into it; blocks in use at once never overlap."""

    kind: MemoryKind
    device: int
    address: int
    nbytes: int

    def put(self, offset: int, array: Any) -> int:
        """Copy an array in, in C order; returns the checksum of its bytes in the buffer."""
        ...

    def get(self, offset: int, offer: Offer) -> tuple[Any, int]:
        """A copy of the tensor at that offset, and the checksum of the copy."""
        ...

    def lend(self, offset: int, offer: Offer) -> tuple[Any, int]:
        """The tensor at that offset, not copied, and its checksum."""
        ...

    def view(self, offset: int, nbytes: int) -> Bytes:
        """The bytes themselves. Raises BufferError where they are not in host memory."""
        ...


def form_of(array: Any, dtype: DType | None) -> Form:
    """Type and shape of an array, with `dtype` overriding its own. Raises ValueError if it cannot be offered."""
    name = cast(
        DType,
        dtype
        or str(array.dtype.newbyteorder("=") if isinstance(array, np.ndarray) else array.dtype).removeprefix(
            "torch."
        ),
    )
    if name not in ITEM_BYTES:
        raise ValueError(f"elements of type {name} cannot be transferred, only {', '.join(ITEM_BYTES)}")
    if array.dtype.itemsize != ITEM_BYTES[name]:
        raise ValueError(f"elements of {array.dtype.itemsize} bytes ({array.dtype}) cannot be {name}")
    form = Form(name, tuple(int(size) for size in array.shape))
    if not form.nbytes:
        raise ValueError(f"an array of shape {form.shape} has nothing to transfer")
    return form


class HostMemory:
    """Anonymous memory of this process, page-aligned. See `Memory`.

    All pages are populated at the start (0.4 s per GiB): first use would otherwise double the time of a transfer. A forked
    child does not inherit it, because copy-on-write would move the pages that hardware reads.
    """

    kind: MemoryKind = "DRAM"
    device = 0

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)  # Linux only
        pages = mmap.mmap(-1, nbytes, flags=flags)
        if hasattr(mmap, "MADV_DONTFORK"):
            pages.madvise(mmap.MADV_DONTFORK)
        self._bytes = np.frombuffer(pages, np.uint8)
        self.nbytes = nbytes
        self.address = self._bytes.ctypes.data

    def put(self, offset: int, array: Any) -> int:
        """See `Memory.put`. Numpy arrays, of any strides and byte order."""
        native = array.dtype.newbyteorder("=")
        there = self.view(offset, array.nbytes)
        if array.flags.c_contiguous and array.dtype == native:
            return copy_checked(there, array.reshape(-1).view(np.uint8))
        np.copyto(there.view(native).reshape(array.shape), array)
        return checksum(there)

    def get(self, offset: int, offer: Offer) -> tuple[Any, int]:
        """See `Memory.get`. bfloat16, which numpy lacks, as the uint16 of its bits."""
        array = np.empty(offer.shape, _numpy_type(offer))
        return array, copy_checked(array.reshape(-1).view(np.uint8), self.view(offset, offer.nbytes))

    def lend(self, offset: int, offer: Offer) -> tuple[Any, int]:
        """See `Memory.lend`."""
        there = self.view(offset, offer.nbytes)
        return there.view(_numpy_type(offer)).reshape(offer.shape), checksum(there)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """See `Memory.view`."""
        return self._bytes[offset : offset + nbytes]


class TensorMemory:
    """A torch tensor: one-dimensional, uint8, contiguous. On a GPU the slab is VRAM. See `Memory`.

    A checksum requires the bytes in host memory: on a GPU that is one more copy over PCIe on each side.
    """

    def __init__(self, tensor: Any) -> None:
        import torch

        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError("a slab is a contiguous one-dimensional tensor of uint8")
        self._torch = torch
        self._tensor = tensor
        self.kind: MemoryKind = "VRAM" if tensor.is_cuda else "DRAM"
        self.device = tensor.get_device() if tensor.is_cuda else 0
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel()

    def put(self, offset: int, array: Any) -> int:
        """See `Memory.put`. Torch tensors of any device and strides, and numpy arrays."""
        source = array if isinstance(array, self._torch.Tensor) else self._torch.from_numpy(array)
        flat = source.contiguous().reshape(-1).view(self._torch.uint8)
        there = self._tensor[offset : offset + flat.numel()]
        there.copy_(flat)
        # `cpu` waits for the preceding copy, so the buffer is complete when its offer is sent.
        return checksum(there.cpu().numpy())

    def get(self, offset: int, offer: Offer) -> tuple[Any, int]:
        """See `Memory.get`. A tensor on the slab's device."""
        return self._tensor_of(self._tensor[offset : offset + offer.nbytes].clone(), offer)

    def lend(self, offset: int, offer: Offer) -> tuple[Any, int]:
        """See `Memory.lend`."""
        return self._tensor_of(self._tensor[offset : offset + offer.nbytes], offer)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """See `Memory.view`."""
        if self._tensor.is_cuda:
            raise BufferError("GPU memory cannot be viewed from the host")
        return cast(Bytes, self._tensor[offset : offset + nbytes].numpy())

    def _tensor_of(self, there: Any, offer: Offer) -> tuple[Any, int]:
        tensor = there.view(getattr(self._torch, offer.dtype)).reshape(offer.shape)
        return tensor, checksum(there.cpu().numpy())


def _numpy_type(offer: Offer) -> str:
    return "uint16" if offer.dtype == "bfloat16" else offer.dtype
