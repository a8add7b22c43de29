"""Translation of tokens to sequence hashes: the block identity shared by edge, worker and router.

A sequence hash identifies a block by its tokens *and* all tokens before it: it is chained over all earlier blocks and
seeded by LoRA name and cache salt; multimodal digests enter at the block they overlap. Equal hashes mean equal prefixes.
It is a routing hint of 64 bits, not a security boundary: the engine checks its own hashes before it reuses a block.

Only the short chaining step depends on the previous block, so a core hashes several blocks in parallel: see
`headwater bench hash`.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headwater.schemas.jit import kernel

U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]
ArrayT = TypeVar("ArrayT", U64, U32)
U8 = NDArray[np.uint8]

ROOT = 0
"""Parent of a first block. No block hashes to it."""

U64_MAX = (1 << 64) - 1
_MASK = U64_MAX
_P1, _P2, _P3 = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F
_W1, _W2, _W3 = np.uint64(_P1), np.uint64(_P2), np.uint64(_P3)
_32, _29, _1, _0 = np.uint64(32), np.uint64(29), np.uint64(1), np.uint64(0)

_NO_EXTRA = np.zeros(0, np.uint64)

MultimodalDigest = tuple[int, int]
"""(index of the block that the item overlaps, 64-bit digest of the item)."""


@kernel
def _chain(tokens: Any, block_size: int, parent: Any, extra: Any, out: Any) -> None:
    pairs = block_size // 2
    state = parent
    for block in range(out.shape[0]):
        at = block * block_size
        digest = _W1 ^ extra[block] if extra.shape[0] else _W1
        for pair in range(pairs):
            word = np.uint64(tokens[at + 2 * pair]) | (np.uint64(tokens[at + 2 * pair + 1]) << _32)
            digest = (digest ^ word) * _W2
            digest ^= digest >> _32
        if block_size % 2:
            digest = (digest ^ np.uint64(tokens[at + block_size - 1])) * _W2
            digest ^= digest >> _32
        state = (state ^ digest) * _W3
        state ^= state >> _29
        state *= _W1
        state ^= state >> _32
        if state == _0:
            state = _1
        out[block] = state


def chain_plain(tokens: Sequence[int], block_size: int, parent: int, extra: Sequence[int] = ()) -> list[int]:
    """The same hashes as the compiled kernel, in plain Python: for tests and as documentation."""
    out: list[int] = []
    state = parent
    for block in range(len(tokens) // block_size):
        digest = _P1 ^ extra[block] if len(extra) else _P1
        at = block * block_size
        for pair in range(block_size // 2):
            word = tokens[at + 2 * pair] | tokens[at + 2 * pair + 1] << 32
            digest = (digest ^ word) * _P2 & _MASK
            digest ^= digest >> 32
        if block_size % 2:
            digest = (digest ^ tokens[at + block_size - 1]) * _P2 & _MASK
            digest ^= digest >> 32
        state = (state ^ digest) * _P3 & _MASK
        state ^= state >> 29
        state = state * _P1 & _MASK
        state ^= state >> 32
        state = state or 1
        out.append(state)
    return out


def seed(lora_name: str = "", cache_salt: str = "") -> int:
    """Root of the chain for a LoRA adapter and a cache salt; 0 when there is neither.

    Tenants with different salts, and adapters of one base model, never share a block.
    """
    if not lora_name and not cache_salt:
        return ROOT
    lora, salt = lora_name.encode(), cache_salt.encode()
    text = len(lora).to_bytes(4, "little") + lora + salt
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") or 1


def sequence_hashes(
    tokens: U32,
    block_size: int,
    *,
    parent: int = ROOT,
    multimodal: Sequence[MultimodalDigest] = (),
) -> U64:
    """Sequence hashes of the full blocks of `tokens`.

    `tokens` is a uint32 array of token ids; `parent` is `seed(...)` for a prompt, or the hash of the block
    before the first token. Returns read-only uint64 of shape (len(tokens) // block_size,); a last partial block has
    no hash. Raises ValueError for a block size below 1 or a multimodal block out of range.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    count = len(tokens) // block_size
    out = np.empty(count, np.uint64)
    extra = np.zeros(count, np.uint64) if multimodal else _NO_EXTRA
    for block, digest in multimodal:
        if block < 0:
            raise ValueError(f"multimodal digest at block {block}: must not be negative")
        if block < count:
            # Several items may overlap one block, in any order; addition does not cancel equal ones.
            extra[block] = (int(extra[block]) + digest) & _MASK
    _chain(as_read_only(tokens), block_size, np.uint64(parent), extra, out)
    out.flags.writeable = False
    return out


def media_digests(items: Iterable[tuple[str, int, int]], block_size: int) -> list[MultimodalDigest]:
    """Digests for `sequence_hashes` of the blocks that items of media overlap; an item is (id, first token, tokens).

    A digest depends on the item and on where it begins relative to the block, as vLLM's keys of a block do.
    """
    digests: list[MultimodalDigest] = []
    for id_, start, tokens in items:
        for block in range(start // block_size, -(-(start + tokens) // block_size)):
            digests.append((block, media_digest(id_, start - block * block_size)))
    return digests


def media_digest(id_: str, offset: int) -> int:
    """Digest of an item of media that begins `offset` tokens after the start of a block; before it, if negative."""
    return int.from_bytes(blake2b(f"{id_}@{offset}".encode(), digest_size=8).digest(), "little")


def tenant_digest(tenant: str) -> int:
    """32 bits by which the log distinguishes tenants without their names, equal on every machine; 0 without a tenant."""
    return int.from_bytes(blake2b(tenant.encode(), digest_size=4).digest(), "big") or 1 if tenant else 0


def as_read_only(array: ArrayT) -> ArrayT:
    """The array, or a read-only view of it: kernels compile once more for arrays that may be written."""
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def pack_tokens(tokens: Sequence[int] | U32) -> bytes:
    """Token ids as packed little-endian u32."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def unpack_tokens(data: bytes) -> U32:
    """View packed token ids as an array, without a copy. Raises ValueError if the length is not a multiple."""
    return np.frombuffer(data, dtype="<u4")


HASH_BYTES = 8
"""Bytes of one packed block hash."""


def pack_hashes(hashes: U64) -> bytes:
    """Block hashes as packed little-endian u64."""
    return hashes.astype("<u8", copy=False).tobytes()


def unpack_hashes(data: bytes) -> U64:
    """View packed block hashes as an array, without a copy. Raises ValueError if the length is not a multiple."""
    return np.frombuffer(data, dtype="<u8")
