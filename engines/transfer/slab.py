"""The allocator of one registered buffer: first fit, with adjacent free blocks joined.

The buffer is registered once, because registering costs as much as moving megabytes; its parts are allocated here. No bytes
are accessed: the same allocator serves host and device memory.
"""

from bisect import bisect_left
from typing import NamedTuple

from headwater.engines.transfer.port import SlabFull

ALIGNMENT = 4096
"""A page: page-aligned copies between processes are fastest, and GPUs require 256."""


class Block(NamedTuple):
    """Bytes [offset, offset + nbytes) of the slab; `nbytes` is a multiple of the alignment."""

    offset: int
    nbytes: int


class Slab:
    """Allocates parts of `capacity` bytes (rounded down to the alignment)."""

    def __init__(self, capacity: int, alignment: int = ALIGNMENT) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment must be a power of two, got {alignment}")
        self.capacity = capacity // alignment * alignment
        if not self.capacity:
            raise ValueError(f"a slab of {capacity} bytes is too small for an alignment of {alignment}")
        self._alignment = alignment
        # Sorted, disjoint and never adjacent.
        self._free = [Block(0, self.capacity)]
        self._used: set[Block] = set()

    @property
    def free_bytes(self) -> int:
        """Free bytes, in any number of pieces."""
        return sum(block.nbytes for block in self._free)

    @property
    def largest_free(self) -> int:
        """The largest block that `allocate` can return now."""
        return max((block.nbytes for block in self._free), default=0)

    def allocate(self, nbytes: int) -> Block:
        """Allocate at least `nbytes`, in the first sufficient gap. Raises `SlabFull`; ValueError below one byte."""
        if nbytes < 1:
            raise ValueError(f"a block has at least one byte, got {nbytes}")
        wanted = -(-nbytes // self._alignment) * self._alignment
        index = next((at for at, gap in enumerate(self._free) if gap.nbytes >= wanted), None)
        if index is None:
            raise SlabFull(
                f"no space for {nbytes} bytes: of {self.capacity} {self.free_bytes} are free, "
                f"{self.largest_free} in one piece. Use a larger slab, or shorter leases"
            )
        gap = self._free[index]
        block = Block(gap.offset, wanted)
        rest = Block(gap.offset + wanted, gap.nbytes - wanted)
        self._free[index : index + 1] = [rest] if rest.nbytes else []
        self._used.add(block)
        return block

    def free(self, block: Block) -> None:
        """Free a block. Raises ValueError for one that is not in use."""
        if block not in self._used:
            raise ValueError(f"{block} is not in use")
        self._used.remove(block)
        index = bisect_left(self._free, block)
        start, end = block.offset, block.offset + block.nbytes
        first, last = index, index
        if index and sum(self._free[index - 1]) == start:
            first, start = index - 1, self._free[index - 1].offset
        if index < len(self._free) and self._free[index].offset == end:
            last, end = index + 1, sum(self._free[index])
        self._free[first:last] = [Block(start, end - start)]
