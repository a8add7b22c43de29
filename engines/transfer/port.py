"""What all transfers of tensors share: their errors, checksums, and the memory that tensors are in. See `TensorTransfer` for offers and reads.

The checksum, XXH3-64, reads 15 GB/s where a transfer moves 8; zlib's crc32, with 2.3, would take three times as long as the transfer itself. It
detects accidents, not forgery.

The bytes of a slab are in host memory, or in a torch tensor on a GPU.
Tests cover `HostMemory` and `TensorMemory` over a CPU tensor; CUDA memory differs only in `kind` and `device`.
"""

import math
import mmap
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, cast, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from headwater.engines.engine import EngineError
from headwater.schemas.media import ClaimReply, DType, MemoryKind, Offer, OfferClaim, OfferReleased

Remedy = Literal["offer", "elsewhere", "later"]


class TransferError(EngineError):
    """Base of the errors of transfers.

    `remedy` says what can help: a new `offer` of the same owner, `elsewhere` (another owner, or computing the tensor
    locally), or the same call `later`.
    """

    remedy: ClassVar[Remedy] = "offer"


class TransferUnavailable(TransferError):
    """This transport is not available here; the message says what to install or change."""

    remedy = "elsewhere"


class SlabFull(TransferError):
    """The slab is full. Raised at once, without waiting or evicting leased blocks."""

    remedy = "later"


class OfferExpired(TransferError):
    """The offer expired, or its owner withdrew it."""


class OfferConsumed(TransferError):
    """The offer was claimed before: each has one reader and one attempt."""


class OfferVoid(TransferError):
    """The lease is unknown to the owner: it is of an earlier epoch of the owner, or was never granted."""


class ChecksumMismatch(TransferError):
    """The bytes read differ from those offered: the buffer was overwritten, or memory is faulty."""


class ReadTimedOut(TransferError):
    """The bytes were not read within the time that the owner granted."""


class TransferFailed(TransferError):
    """The transport rejected or aborted the read, without an indication that the owner ended."""


class PeerGone(TransferError):
    """The owner's process has ended, or is shutting down."""

    remedy = "elsewhere"


class TransferClosed(TransferError):
    """This side is closed."""

    remedy = "elsewhere"


class Control(Protocol):
    """A reader's channel to the owner of an offer, implemented over the bus."""

    async def claim(self, offer: Offer, claim: OfferClaim) -> ClaimReply:
        """Deliver `claim` to the owner's `answer` and return the reply. Raises `PeerGone` without a reply."""
        ...

    async def release(self, offer: Offer, released: OfferReleased) -> None:
        """Deliver `released` to the owner's `released`. It may get lost: then the owner's timeouts apply."""
        ...


class Stats(NamedTuple):
    """Bytes of the slab by state, and ended leases by outcome since the start.

    `held` is being written by this side or read into; `capacity` is the sum of the other four and `held`.
    """

    capacity: int
    free: int
    held: int
    offered: int
    claimed: int
    quarantined: int
    ended: dict[str, int]


# XXH3-64, and a copy that computes it.

Bytes = NDArray[np.uint8]

PIECE: Final = 1 << 20
"""Bytes copied before they are hashed: they are then still in the core's cache, so memory is read once."""


def checksum(data: Bytes) -> int:
    """XXH3-64 of contiguous bytes. Does not hold the GIL."""
    return xxhash.xxh3_64_intdigest(data.data)


def copy_checked(into: Bytes, source: Bytes) -> int:
    """Copy `source` to `into` (contiguous, of one size); returns the checksum of what `into` has then.

    Of the copy, not of the source, which others may change.
    """
    state = xxhash.xxh3_64()
    for at in range(0, source.nbytes, PIECE):
        piece = into[at : at + PIECE]
        np.copyto(piece, source[at : at + PIECE])
        state.update(piece.data)
    return state.intdigest()


# The memory that tensors are in.

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
        region = self.view(offset, array.nbytes)
        if array.flags.c_contiguous and array.dtype == native:
            return copy_checked(region, array.reshape(-1).view(np.uint8))
        np.copyto(region.view(native).reshape(array.shape), array)
        return checksum(region)

    def get(self, offset: int, offer: Offer) -> tuple[Any, int]:
        """See `Memory.get`. bfloat16, which numpy lacks, as the uint16 of its bits."""
        array = np.empty(offer.shape, _numpy_type(offer))
        return array, copy_checked(array.reshape(-1).view(np.uint8), self.view(offset, offer.nbytes))

    def lend(self, offset: int, offer: Offer) -> tuple[Any, int]:
        """See `Memory.lend`."""
        region = self.view(offset, offer.nbytes)
        return region.view(_numpy_type(offer)).reshape(offer.shape), checksum(region)

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
        region = self._tensor[offset : offset + flat.numel()]
        region.copy_(flat)
        # `cpu` waits for the preceding copy, so the buffer is complete when its offer is sent.
        return checksum(region.cpu().numpy())

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

    def _tensor_of(self, region: Any, offer: Offer) -> tuple[Any, int]:
        tensor = region.view(getattr(self._torch, offer.dtype)).reshape(offer.shape)
        return tensor, checksum(region.cpu().numpy())


def _numpy_type(offer: Offer) -> str:
    return "uint16" if offer.dtype == "bfloat16" else offer.dtype
