"""Event batches of vLLM and SGLang as published: msgpack `[ts, [event, …], rank]`.

Events are maps with a `type` key since June 2026, positional arrays with the tag first before that; both are read. The
fields that both engines have bear the same names and stand in the same order; SGLang's are the first of vLLM's.
"""

from typing import Any, NamedTuple

import msgspec

from headwater.schemas import hashing

_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")


class KvEventBatch(NamedTuple):
    """Events of one step as maps, published at `at_s` (Unix time of the engine's machine)."""

    at_s: float
    events: list[dict[str, Any]]


def decode(payload: bytes) -> KvEventBatch:
    """One published batch. Raises `msgspec.DecodeError` or ValueError for anything else."""
    batch = msgspec.msgpack.decode(payload)
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("not an event batch")
    return KvEventBatch(float(batch[0]), [_as_map(event) for event in batch[1]])


def _as_map(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    if not isinstance(event, list) or not event:
        raise ValueError(f"not an event: {event!r}")
    tag, *values = event
    fields = {"BlockStored": _STORED_FIELDS, "BlockRemoved": _REMOVED_FIELDS}.get(tag, ())
    return {"type": tag, **dict(zip(fields, values, strict=False))}


def salt(keys: Any, lora: str) -> str:
    """The cache salt among a first block's extra keys: the text other than the LoRA name, which is first."""
    texts = [key for key in keys or () if isinstance(key, str)]
    if lora and lora in texts:
        texts.remove(lora)
    return texts[0] if texts else ""


def multimodal(extra: list[Any]) -> list[hashing.MultimodalDigest]:
    """(block, digest) of the multimodal items: pairs of item id and its offset from the block's start among the extra keys."""
    found: list[hashing.MultimodalDigest] = []
    for block, keys in enumerate(extra):
        for key in keys or ():
            if isinstance(key, list | tuple) and len(key) >= 2 and isinstance(key[0], str):
                found.append((block, hashing.media_digest(key[0], int(key[1]))))
    return found
