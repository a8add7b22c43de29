"""Which bytes of one registered buffer are in use: first fit, with neighbours joined when they come back.

The buffer is registered once, because registering costs as much as moving megabytes; so its parts are handed out
here. No bytes are touched: the same allocator serves host and device memory.
"""

from bisect import bisect_left
from typing import NamedTuple

from headwater.engines.transfer.port import SlabFull

ALIGNMENT = 4096
"""A page: copies between pages of two processes are fastest, and GPUs ask for 256."""


class Block(NamedTuple):
    """Bytes [offset, offset + nbytes) of the slab; `nbytes` is a multiple of the alignment."""

    offset: int
    nbytes: int


class Slab:
    """Hands out parts of `capacity` bytes (rounded down to the alignment)."""

    def __init__(self, capacity: int, alignment: int = ALIGNMENT) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment must be a power of two, got {alignment}")
        self.capacity = capacity // alignment * alignment
        if not self.capacity:
            raise ValueError(f"a slab of {capacity} bytes has no room at an alignment of {alignment}")
        self._alignment = alignment
        # Sorted, disjoint and never adjacent.
        self._free = [Block(0, self.capacity)]
        self._used: set[Block] = set()

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has, in however many pieces."""
        return sum(block.nbytes for block in self._free)

    @property
    def largest_free(self) -> int:
        """The most that one `allocate` can get now."""
        return max((block.nbytes for block in self._free), default=0)

    def allocate(self, nbytes: int) -> Block:
        """At least `nbytes`, in the first gap that has them. Raises `SlabFull`; ValueError below one byte."""
        if nbytes < 1:
            raise ValueError(f"a block has at least one byte, got {nbytes}")
        wanted = -(-nbytes // self._alignment) * self._alignment
        index = next((at for at, gap in enumerate(self._free) if gap.nbytes >= wanted), None)
        if index is None:
            raise SlabFull(
                f"no room for {nbytes} bytes: of {self.capacity} {self.free_bytes} are free, "
                f"{self.largest_free} in one piece. Make the slab larger, or offers shorter"
            )
        gap = self._free[index]
        block = Block(gap.offset, wanted)
        rest = Block(gap.offset + wanted, gap.nbytes - wanted)
        self._free[index : index + 1] = [rest] if rest.nbytes else []
        self._used.add(block)
        return block

    def free(self, block: Block) -> None:
        """Take a block back. Raises ValueError for one that is not in use."""
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
