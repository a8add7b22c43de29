"""KV-cache events of vLLM and SGLang: their decoding, and their translation into events of the log. Pure.

An engine's own block hashes (integers, or bytes by a setting of vLLM) are opaque: each block is identified by its sequence
hash, computed from the event's tokens, LoRA name, salt and extra keys, so that an edge can compute the same hash
independently of the engine.

Only certain facts are published:

* Copies are counted per tier; the removal of an unknown block is ignored, so no count falls below zero.
* Offloading connectors report blocks in host memory or on disk by vLLM's hash alone: such a block has the sequence hash that
  it had on the GPU, as long as that is recorded.
* A model with several cache groups has each block once in each group. The first group of full attention represents all:
  sliding windows, Mamba states and further groups are ignored. vLLM may then have fewer cache hits than the index says.
* A requested clear takes effect at once. An engine reports it only with its next step, which a sleeping one does not make;
  events received until then are older, and are ignored.
* After an unrecoverable gap the cache's content is unknown. From then on only blocks that are announced count, which is
  correct but incomplete: `cold` says that requests should make vLLM announce reused cached blocks
  (`kv_cache_report_mode`; neither engine has a dump, and SGLang announces a block once). Copies are not counted in this
  state, as a copy and a repetition are indistinguishable. A clear ends it.
* SGLang replaces the tokens of images by numbers above any token id (`sentinels`). Blocks with images of the engine's own requests have
  the names that edges compute; others, and what follows them, have none.

Such a number has 62 bits and says nothing of the item's id, so the items of the engine's own requests are remembered by their numbers.
An item's numbers repeat over its tokens: a block that begins within an item shows which one, but not how far in.
That is known from the block before it.

Events are maps with a `type` key since June 2026, and before that positional arrays with the tag first; both are read. The
fields that both engines have bear the same names and stand in the same order; SGLang's are the first of vLLM's.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from headwater.engines.engine import KvEvent
from headwater.schemas import hashing
from headwater.schemas.events import CPU, DISK, GPU, BlocksCleared, BlocksRemoved, BlocksStored, KvGap

TOKEN_MAX: Final = (1 << 32) - 1
"""Numbers above stand for a part of an item; that one is not is as likely as 1 to 2^30."""

SENTINELS_REMEMBERED: Final = 32_768
"""Bound on remembered items."""


class Within(NamedTuple):
    """A place within an item: after `before` of its tokens."""

    id: str
    before: int


class _Item(NamedTuple):
    id: str
    tokens: int
    numbers: NDArray[np.int64]
    placeholder: int


class Resolved(NamedTuple):
    """The tokens of an event up to the first that stands for an unknown item, with those of items replaced by their placeholders.

    `media` are (id, first token, tokens) as `hashing.media_digests` takes them; one that began before has a negative first token.
    """

    tokens: hashing.U32
    media: list[tuple[str, int, int]]

    def within(self, position: int) -> Within | None:
        """The place within an item before the token at `position`, None between items."""
        for id_, start, tokens in self.media:
            if start < position < start + tokens:
                return Within(id_, position - start)
        return None


class MediaSentinels:
    """The media of an engine's requests by the numbers that its events have for them."""

    def __init__(self) -> None:
        self._by_number: OrderedDict[int, _Item] = OrderedDict()
        self._by_id: dict[str, _Item] = {}

    def learn(self, id_: str, tokens: int, numbers: Sequence[int], placeholder: int) -> None:
        """A request has this item: its events will have `numbers`, over and over, in the place of its `tokens` tokens, each a `placeholder`."""
        learned = self._by_id.get(id_)
        if learned is not None and learned.tokens == tokens:
            self._by_number.move_to_end(int(learned.numbers[0]))
            return
        item = _Item(id_, tokens, np.array(numbers, np.int64), placeholder)
        self._by_id[id_] = item
        self._by_number[int(item.numbers[0])] = item
        if len(self._by_number) > SENTINELS_REMEMBERED:
            _, forgotten = self._by_number.popitem(last=False)
            self._by_id.pop(forgotten.id, None)

    def resolve(self, token_ids: Sequence[int], within: Within | None) -> Resolved:
        """The tokens of an event whose first one follows the place `within` an item, if that is not None."""
        numbers = np.array(token_ids, np.int64)
        tokens = numbers.astype(np.uint32)
        special = np.flatnonzero(numbers > TOKEN_MAX)
        media: list[tuple[str, int, int]] = []
        at = 0
        if within is not None:
            item = self._by_id.get(within.id)
            if item is None or not self._take(item, -within.before, numbers, tokens, media):
                return Resolved(tokens[:0], [])
            at = item.tokens - within.before
        while (number := int(np.searchsorted(special, at))) < len(special):
            at = int(special[number])
            item = self._by_number.get(int(numbers[at]))
            if item is None or not self._take(item, at, numbers, tokens, media):
                return Resolved(tokens[:at], media)
            at += item.tokens
        return Resolved(tokens, media)

    def _take(
        self,
        item: _Item,
        start: int,
        numbers: NDArray[np.int64],
        tokens: hashing.U32,
        media: list[tuple[str, int, int]],
    ) -> bool:
        """Replace the item that begins at `start`, unless its numbers are others."""
        first, end = max(start, 0), min(start + item.tokens, len(numbers))
        expected = item.numbers[np.arange(first - start, end - start) % len(item.numbers)]
        if not np.array_equal(numbers[first:end], expected):
            return False
        tokens[first:end] = item.placeholder
        media.append((item.id, start, item.tokens))
        return True


class PendingKvEvents:
    """Events that nobody has read yet, for engines that make their own."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._ready = asyncio.Event()

    def add(self, events: Sequence[KvEvent]) -> None:
        """Add some, in order."""
        if events:
            self._events += events
            self._ready.set()

    def take(self) -> list[KvEvent]:
        """All of them, which are then read. `Engine.held_blocks` drops them so, as their result is in what it returns."""
        events, self._events = self._events, []
        return events

    async def batches(self) -> AsyncIterator[list[KvEvent]]:
        """See `Engine.kv_events`."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            if events := self.take():
                yield events


# Event batches as published: msgpack `[ts, [event, …], rank]`.

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
    digests: list[hashing.MultimodalDigest] = []
    for block, keys in enumerate(extra):
        for key in keys or ():
            if isinstance(key, list | tuple) and len(key) >= 2 and isinstance(key[0], str):
                digests.append((block, hashing.media_digest(key[0], int(key[1]))))
    return digests


# Translation to events of the log.

TIERS = {"GPU": GPU, "CPU": CPU, "CPU_PINNED": CPU, "STORAGE": DISK, "DISK": DISK, "EXTERNAL": DISK}

DENSE_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of cache groups whose blocks form a chain from the start of the prompt. Others are not indexed."""

REMEMBERED = 32_768
"""Bound on recorded hashes of removed blocks: offloading may report these blocks later."""

EngineHash = int | bytes

_log = structlog.get_logger("headwater.kv_events")


class _NamedBlock(NamedTuple):
    """A block: its sequence hash, its parent's, and the image within which it ends, if any."""

    name: int
    parent: int
    within: Within | None = None


class _Held(NamedTuple):
    """A cached block and its copies per tier."""

    block: _NamedBlock
    copies: dict[int, int]


class KvTranslator:
    """Records an engine's cached blocks by the engine's hashes, and translates its events.

    Blocks of another size than `block_size` are ignored, as are blocks without a sequence hash: `orphans` counts those
    after an unknown parent (events were lost), `unnamed` those reported by an unknown hash, or with parts of unknown media where
    the engine has numbers for these among its tokens (`sentinels`).
    """

    def __init__(self, block_size: int, *, sentinels: MediaSentinels | None = None) -> None:
        self._block_size = block_size
        self._sentinels = sentinels
        self._held: dict[EngineHash, _Held] = {}
        self._gone: OrderedDict[EngineHash, _NamedBlock] = OrderedDict()
        self._group: int | None = None
        self._seen = 0
        self._asked = 0
        self._asked_s = 0.0
        self.cold = False
        self.orphans = 0
        self.unnamed = 0

    def __len__(self) -> int:
        return len(self._held)

    def translate(self, events: list[dict[str, Any]], at_s: float = 0.0) -> list[KvEvent]:
        """Events for one batch of the engine, published at `at_s` (Unix time)."""
        translated: list[KvEvent] = []
        if self._fenced and at_s > self._asked_s and not any(map(_is_clear, events)):
            # The first batch after a clear reports it: this one does not, so the cache's content is unknown.
            self._asked, self.cold = self._seen, True
        for event in events:
            if _is_clear(event):
                self._seen += 1
                if self._seen > self._asked:
                    translated += self._cleared()
            elif self._fenced:
                # From before a clear that was already published.
                continue
            elif event.get("type") == "BlockStored":
                translated += self._stored(event)
            elif event.get("type") == "BlockRemoved":
                translated += self._removed(event)
            # A newer engine may send unknown events; known ones stay valid.
        return translated

    @property
    def _fenced(self) -> bool:
        """Is a requested clear not yet reported by the engine?"""
        return self._seen < self._asked

    def expect_clear(self) -> None:
        """Call before requesting a clear from the engine. One at a time."""
        if not self._fenced:
            self._asked = self._seen

    def confirm_clear(self, at_s: float) -> list[KvEvent]:
        """The clear was completed by `at_s` (Unix time): the events for it. The engine reports it with its next batch."""
        self._asked += 1
        self._asked_s = at_s
        return self._cleared() if self._fenced else []

    def lost(self, missing: int) -> list[KvEvent]:
        """Batches were lost permanently: forget all blocks; only those announced from now on count."""
        # The pending clear may have been among them.
        self._asked = self._seen
        translated: list[KvEvent] = [KvGap(missing), *self._cleared()]
        self.cold = True
        return translated

    def _cleared(self) -> list[KvEvent]:
        self._held.clear()
        self._gone.clear()
        self.cold = False
        return [BlocksCleared()]

    def held(self) -> list[BlocksStored]:
        """All cached blocks, parents before children, as runs per tier."""
        by_name = {held.block.name: held for held in self._held.values()}
        order: list[_Held] = []
        placed: set[int] = set()
        for held in by_name.values():
            chain = []
            at: _Held | None = held
            while at is not None and at.block.name not in placed:
                placed.add(at.block.name)
                chain.append(at)
                at = by_name.get(at.block.parent)
            order += reversed(chain)
        events: list[BlocksStored] = []
        for held in order:
            for tier, copies in held.copies.items():
                events += [_stored_event(held.block, tier)] * copies
        return _joined(events)

    def _stored(self, event: dict[str, Any]) -> list[KvEvent]:
        if not self._indexed(event):
            return []
        hashes: list[EngineHash] = event["block_hashes"]
        tier = TIERS.get(event.get("medium") or "GPU", GPU)
        if not event["token_ids"] or not event["block_size"]:
            named = self._by_hash(hashes)
        elif event["block_size"] == self._block_size:
            named = self._by_tokens(event, hashes)
        else:
            return []
        stored_events: list[BlocksStored] = []
        for engine_hash, block in named:
            held = self._held.get(engine_hash)
            if held is None:
                # Equal hashes mean equal blocks, also where the event has fewer fields than the first one.
                held = _Held(self._gone.pop(engine_hash, block), {})
                self._held[engine_hash] = held
            if self.cold and held.copies.get(tier):
                continue
            held.copies[tier] = held.copies.get(tier, 0) + 1
            stored_events.append(_stored_event(held.block, tier))
        return list(_joined(stored_events))

    def _by_hash(self, hashes: list[EngineHash]) -> list[tuple[EngineHash, _NamedBlock]]:
        """The blocks with these hashes that are or were cached."""
        named: list[tuple[EngineHash, _NamedBlock]] = []
        for engine_hash in hashes:
            held = self._held.get(engine_hash)
            block = held.block if held else self._gone.get(engine_hash)
            if block is None:
                self.unnamed += 1
            else:
                named.append((engine_hash, block))
        return named

    def _by_tokens(
        self, event: dict[str, Any], hashes: list[EngineHash]
    ) -> list[tuple[EngineHash, _NamedBlock]]:
        """A run of blocks; empty where unknown."""
        extra = event.get("extra_keys") or []
        parent_hash: EngineHash | None = event.get("parent_block_hash")
        within: Within | None = None
        if parent_hash is None:
            lora = event.get("lora_name") or ""
            cache_salt = event.get("cache_salt") or salt(extra[0] if extra else None, lora)
            parent = hashing.seed(lora, cache_salt)
        else:
            held_parent = self._held.get(parent_hash)
            if held_parent is None:
                self.orphans += len(hashes)
                return []
            parent, within = held_parent.block.name, held_parent.block.within
        size = self._block_size
        token_ids = _token_ids(event["token_ids"])
        if len(token_ids) < len(hashes) * size:
            return []
        run = self._resolved(token_ids[: len(hashes) * size], within)
        named = len(run.tokens) // size
        if named < len(hashes):
            self.unnamed += len(hashes) - named
            _log.info("kv_blocks_of_unknown_media", blocks=len(hashes) - named)
        digests = [*multimodal(extra), *hashing.media_digests(run.media, size)]
        names: list[int] = hashing.sequence_hashes(
            run.tokens[: named * size],
            size,
            parent=parent,
            # An item that began before this run has digests of earlier blocks, too.
            multimodal=[(block, digest) for block, digest in digests if block >= 0],
        ).tolist()
        return [
            (engine_hash, _NamedBlock(name, before, run.within((number + 1) * size)))
            for number, (engine_hash, name, before) in enumerate(
                zip(hashes, names, [parent, *names], strict=False)
            )
        ]

    def _resolved(self, token_ids: list[int], within: Within | None) -> Resolved:
        if self._sentinels is None:
            return Resolved(np.array(token_ids, np.uint32), [])
        return self._sentinels.resolve(token_ids, within)

    def _removed(self, event: dict[str, Any]) -> list[KvEvent]:
        group = event.get("group_idx")
        if group is not None and self._group is not None and group != self._group:
            return []
        tier = TIERS.get(event.get("medium") or "GPU", GPU)
        names: list[int] = []
        for engine_hash in event["block_hashes"]:
            held = self._held.get(engine_hash)
            if held is None or not held.copies.get(tier):
                continue
            names.append(held.block.name)
            held.copies[tier] -= 1
            if not held.copies[tier]:
                del held.copies[tier]
            if not held.copies:
                del self._held[engine_hash]
                self._remember(engine_hash, held.block)
        return [BlocksRemoved(hashing.pack_hashes(np.array(names, np.uint64)), tier)] if names else []

    def _remember(self, engine_hash: EngineHash, block: _NamedBlock) -> None:
        self._gone[engine_hash] = block
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def _indexed(self, event: dict[str, Any]) -> bool:
        """Does it belong to the indexed group, the first dense one?"""
        kind, group = event.get("kv_cache_spec_kind"), event.get("group_idx")
        if kind is not None and kind not in DENSE_KINDS:
            return False
        if group is None:
            return True
        if self._group is None and kind is not None:
            self._group = group
        return self._group is None or group == self._group


def _token_ids(entries: list[Any]) -> list[int]:
    """Token ids of an event. Under SGLang's EAGLE each is a pair with the following token."""
    return [pair[0] for pair in entries] if entries and isinstance(entries[0], list | tuple) else entries


def _stored_event(block: _NamedBlock, tier: int) -> BlocksStored:
    return BlocksStored(block.parent, block.name.to_bytes(hashing.HASH_BYTES, "little"), tier)


def _is_clear(event: dict[str, Any]) -> bool:
    return event.get("type") == "AllBlocksCleared"


def _joined(events: list[BlocksStored]) -> list[BlocksStored]:
    """Merge events of consecutive blocks: a third of the bytes per block."""
    joined: list[BlocksStored] = []
    for event in events:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.tier == event.tier
            and int.from_bytes(last.hashes[-8:], "little") == event.parent
        ):
            joined[-1] = BlocksStored(last.parent, last.hashes + event.hashes, last.tier)
        else:
            joined.append(event)
    return joined
