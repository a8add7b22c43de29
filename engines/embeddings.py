"""Embeddings of media: computed, kept, announced, written to files and read back.

An engine may load an embedding more than once for one request, so it stays while a request has it; and a request that its worker
has cancelled may still be in the engine's queue, so the embedding then stays for `LINGER_S`. One that a request was promised
stays for `PROMISED_S`: it is on its way. Others are removed when their room is needed, the least recently used first.

For routers an embedding is a chain of blocks in the worker's cache (`embedding_hashes`), so they send an image to where it is encoded
already, count what a worker would have to compute, and credit a worker with what it computes now.

The worker and the processes of its engine are on one machine, and share embeddings as files in a folder, in memory where the system allows it. A file
appears whole or not at all.
"""

import asyncio
import math
import os
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np

from headwater.engines import process
from headwater.engines.engine import (
    Emit,
    EncodedImage,
    EngineBase,
    EngineError,
    EngineLoad,
    KvEvent,
    RequestRejected,
    Transfer,
)
from headwater.engines.kv_events import PendingKvEvents
from headwater.schemas.encode_requests import embedding_blocks, embedding_hashes
from headwater.schemas.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.schemas.hashing import ROOT, pack_hashes
from headwater.schemas.inference import GenerateRequest
from headwater.schemas.media import SEVERAL, PromptMedia
from headwater.schemas.tables import Capability, MediaSupport

LINGER_S: Final = 60.0

PROMISED_S: Final = 10.0
"""How long an embedding found here is kept for the request to start in the engine: a worker may claim KV and read other embeddings in that time."""


class StoreFull(EngineError):
    """All embeddings of the store are in use."""


class Shelf(Protocol):
    """The place where a store keeps its tensors, by the images' ids."""

    def write(self, identifier: str, tensor: Any) -> None:
        """Add one; called in a thread."""
        ...

    def remove(self, identifier: str) -> None:
        """Remove one. It may be missing."""
        ...

    def close(self) -> None:
        """Remove all."""
        ...


class EmbeddingGone(RequestRejected):
    """A request took longer than `PROMISED_S` to start; another try fetches its images."""

    retryable = True


class _HeldEmbedding(msgspec.Struct):
    nbytes: int
    fields: bytes
    until_s: float
    users: int = 0


class EmbeddingStore:
    """Up to `bytes_max` bytes on `shelf`. `now` is monotonic, in seconds. Used from one event loop only."""

    def __init__(self, shelf: Shelf, bytes_max: int, now: Callable[[], float]) -> None:
        self.nbytes = 0
        self._shelf = shelf
        self._bytes_max = bytes_max
        self._now = now
        self._held: OrderedDict[str, _HeldEmbedding] = OrderedDict()
        self._writing: dict[str, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        """Embeddings held."""
        return len(self._held)

    def fields(self, item: PromptMedia) -> bytes | None:
        """Return what came with the embedding of an image; None if it is not here. Promises that it stays for a while."""
        held = self._held.get(item.id)
        if held is None:
            return None
        held.until_s = max(held.until_s, self._now() + PROMISED_S)
        self._held.move_to_end(item.id)
        return held.fields

    async def put(self, item: PromptMedia, tensor: Any, fields: bytes) -> None:
        """Add the embedding of an image, a torch tensor. Raises `StoreFull`, and `EngineError` if it cannot be written."""
        writing = self._writing.get(item.id)
        if writing is not None:
            await asyncio.wait({writing})
        if item.id in self._held:
            return
        nbytes = int(tensor.nbytes)
        self._make_room(nbytes)
        self.nbytes += nbytes
        # Not cancelled with a request: others may have its image.
        writing = asyncio.ensure_future(asyncio.to_thread(self._shelf.write, item.id, tensor))
        self._writing[item.id] = writing
        writing.add_done_callback(partial(self._note_written, item.id, nbytes, fields))
        try:
            await asyncio.shield(writing)
        except Exception as error:  # a full /dev/shm, for one, which safetensors reports in its own way
            raise EngineError(f"an image embedding of {nbytes} bytes cannot be written: {error}") from error

    def _note_written(self, id_: str, nbytes: int, fields: bytes, written: "asyncio.Future[None]") -> None:
        if self._writing.get(id_) is written:
            del self._writing[id_]
        if written.cancelled() or written.exception() is not None:
            self.nbytes -= nbytes
        else:
            self._held[id_] = _HeldEmbedding(nbytes, fields, self._now() + PROMISED_S)

    def _make_room(self, nbytes: int) -> None:
        now = self._now()
        for id_, held in list(self._held.items()):
            if self.nbytes + nbytes <= self._bytes_max:
                return
            if not held.users and held.until_s <= now:
                del self._held[id_]
                self.nbytes -= held.nbytes
                self._shelf.remove(id_)
        if self.nbytes + nbytes > self._bytes_max:
            raise StoreFull(
                f"{len(self._held)} image embeddings with {self.nbytes} bytes are in use; {self._bytes_max} bytes are the most"
            )

    def pin(self, items: Sequence[PromptMedia]) -> list[str]:
        """A request has these items; returns the ids of those that are here, to unpin when it has ended."""
        held_ids = [item.id for item in items if item.id in self._held]
        for id_ in held_ids:
            self._held[id_].users += 1
        return held_ids

    def unpin(self, ids: Sequence[str], *, was_cancelled: bool) -> None:
        """The request has ended; if it was cancelled, the engine may not know yet."""
        for id_ in ids:
            held = self._held[id_]
            held.users -= 1
            if was_cancelled:
                held.until_s = max(held.until_s, self._now() + LINGER_S)

    def close(self) -> None:
        """Remove all embeddings."""
        self._shelf.close()


# The embeddings that an encode worker keeps (the least recently used goes first), and their events.


class EmbeddingCache:
    """Up to `blocks_max` blocks of `block_size` tokens. Events wait in `events` until they are read."""

    def __init__(self, block_size: int, blocks_max: int) -> None:
        self.events = PendingKvEvents()
        self.used_blocks = 0
        self._block_size = block_size
        self._blocks_max = blocks_max
        self._held: OrderedDict[str, tuple[PromptMedia, EncodedImage]] = OrderedDict()

    def __len__(self) -> int:
        """Embeddings held."""
        return len(self._held)

    def find(self, item: PromptMedia) -> EncodedImage | None:
        """The embedding of an image, now the most recently used one."""
        cached = self._held.get(item.id)
        # Ids are hashes of the content; the number of tokens comes with the message.
        if cached is None or cached[0].tokens != item.tokens:
            return None
        self._held.move_to_end(item.id)
        return cached[1]

    def keep(self, item: PromptMedia, image: EncodedImage) -> None:
        """Add an embedding, unless it alone is larger than the cache. Not its pixels."""
        blocks = embedding_blocks(item, self._block_size)
        if blocks > self._blocks_max or item.id in self._held:
            return
        while self.used_blocks + blocks > self._blocks_max:
            _, (dropped, _) = self._held.popitem(last=False)
            self.used_blocks -= embedding_blocks(dropped, self._block_size)
            self.events.add([BlocksRemoved(self._hashes(dropped))])
        bare = PromptMedia(item.kind, item.id, 0, item.tokens, item.shape)
        self._held[item.id] = bare, image
        self.used_blocks += blocks
        self.events.add([self._stored(bare)])

    def held_blocks(self) -> list[BlocksStored]:
        """All that is held, as events; those that wait are dropped."""
        self.events.take()
        return self.blocks()

    def blocks(self) -> list[BlocksStored]:
        """All that is held, as events."""
        return [self._stored(item) for item, _ in self._held.values()]

    def clear(self) -> None:
        """Drop everything."""
        self.events.take()
        self._held.clear()
        self.used_blocks = 0
        self.events.add([BlocksCleared()])

    def _stored(self, item: PromptMedia) -> BlocksStored:
        return BlocksStored(ROOT, self._hashes(item))

    def _hashes(self, item: PromptMedia) -> bytes:
        return pack_hashes(embedding_hashes(item, self._block_size))


# Files in a folder shared with the engine's processes: safetensors, one tensor per file.

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
        process.give_up(self.folder)


def make_folder() -> Path:
    """A new private folder, in memory if possible."""
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    return process.take("embeddings", parent)


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


def count(folder: Path, counter: str) -> None:
    """Count something that the engine process did: a byte per time, in a file that the worker reads."""
    with open(folder / counter, "ab") as file:
        file.write(b".")


def counted(folder: Path, counter: str) -> int:
    """Return how often it was counted."""
    try:
        return (folder / counter).stat().st_size
    except FileNotFoundError:
        return 0


# The embeddings that an engine is given.


class EmbeddingInput:
    """Up to `mib` MiB of embeddings for one engine, on `shelf`; in `folder` its processes count what they encode themselves."""

    def __init__(self, shelf: Shelf, folder: Path, mib: int) -> None:
        self.folder = folder
        self.store = EmbeddingStore(shelf, mib << 20, time.monotonic)
        self.form: ModelEmbeddings | None = None
        """What the engine computes of media itself, and can be given, once that is verified."""

    @property
    def encoded(self) -> int:
        """Items that the engine has encoded itself."""
        return counted(self.folder, ENCODED)

    def holds(self, item: PromptMedia) -> bool:
        """See `Engine.holds_embedding`. Without fields the model needs the pixels too."""
        return bool(self.store.fields(item))

    async def put(self, item: PromptMedia, image: EncodedImage) -> None:
        """See `Engine.put_embedding`. Engines load what they are given unseen, and end on what does not fit its prompt."""
        if self.form is None:
            raise EngineError("this engine takes no embeddings of media")
        self.form.check(item, image)
        await self.store.put(item, tensor_of(image), image.fields)

    def fields_of(self, media: Sequence[PromptMedia]) -> list[dict[str, Any]] | None:
        """Return what the model needs of a request's items besides their embeddings; None if they came with pixels. Raises `EmbeddingGone`."""
        if not media or any(item.data for item in media):
            return None
        all_fields = [self.store.fields(item) for item in media]
        if not all(all_fields):
            raise EmbeddingGone("an image's embedding was here when it was asked for, and is no longer")
        return [msgspec.json.decode(fields or b"{}") for fields in all_fields]


# The engine of an encode worker, whatever computes: one computation per image.


class ImageEncoder(EngineBase):
    """The part of `headwater.engines.engine.Engine` that all encoders have. `start` sets `_support` and calls `_open_cache`."""

    capabilities: frozenset[Capability] = frozenset({"encode", "kv_events", "kv_dump", "clear_kv"})

    def __init__(self) -> None:
        self._blocks = 0
        self._support = MediaSupport()
        self._cache = EmbeddingCache(1, 0)
        self._running: dict[str, asyncio.Task[EncodedImage]] = {}
        """The running computations by image: several requests that have it wait for one."""

    def _open_cache(self, block_size: int, blocks: int) -> None:
        self._blocks = max(1, blocks)
        self._cache = EmbeddingCache(block_size, self._blocks)

    @abstractmethod
    async def _compute(self, item: PromptMedia) -> EncodedImage:
        """The embedding of an image with pixels. Raises `RequestRejected`, and `EngineError` if it cannot be computed."""

    async def encode(self, item: PromptMedia) -> EncodedImage:
        """See `Engine.encode`."""
        if item.kind not in self._support.placeholders:
            raise RequestRejected(f"this encode worker takes no {SEVERAL[item.kind]}", param="messages")
        cached = self._cache.find(item)
        if cached is not None:
            return cached._replace(cached=True)
        running = self._running.get(item.id)
        joins = running is not None
        if running is None:
            running = asyncio.get_running_loop().create_task(self._compute(item), name="encode")
            self._running[item.id] = running
            running.add_done_callback(lambda done: self._end(item, done))
        # A request that leaves does not stop it for the others.
        return (await asyncio.shield(running))._replace(cached=joins)

    def _end(self, item: PromptMedia, done: "asyncio.Task[EncodedImage]") -> None:
        self._running.pop(item.id, None)
        if not done.cancelled() and done.exception() is None:
            self._cache.keep(item, done.result())

    def holds_embedding(self, item: PromptMedia) -> bool:
        """See `Engine.holds_embedding`."""
        return self._cache.find(item) is not None or item.id in self._running

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`: it generates nothing."""
        raise RequestRejected("this worker only encodes media")

    def abort(self, request: str) -> None:
        """See `Engine.abort`."""

    def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """See `Engine.kv_events`."""
        return self._cache.events.batches()

    def held_blocks(self) -> list[BlocksStored]:
        """See `Engine.held_blocks`."""
        return self._cache.held_blocks()

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        return EngineLoad(len(self._running), 0, self._cache.used_blocks, self._blocks)

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`."""
        self._cache.clear()


# Embeddings as tensors of torch, and as what the transport between workers carries.


def tensor_of(image: EncodedImage) -> Any:
    """The embedding as a tensor: one row for each token of the image."""
    import torch

    if image.dtype == "bfloat16":
        return torch.from_numpy(image.values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(image.values))


def encoded_image(tensor: Any, fields: bytes) -> EncodedImage:
    """A tensor in host memory as an embedding. `fields` as in `ImageEmbedding`."""
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        return EncodedImage(tensor.view(torch.int16).numpy().view(np.uint16), "bfloat16", fields)
    values = tensor.numpy()
    return EncodedImage(values, str(values.dtype), fields)  # type: ignore[arg-type]  # the types of vision encoders are all `DType`s


TOKEN_COUNT: Final = "audio_num_tokens"
"""The field of an audio clip with its number of tokens, as vLLM names it."""


class ModelEmbeddings(NamedTuple):
    """What the embeddings of a model's media look like, as its probe item shows: rows of `width` numbers of `dtype`.

    `patches` of the grid of an image or a video make one token; 0 where the model needs no grid. An engine ends on fewer rows
    than the prompt has tokens, or on a grid of more, and answers wrongly with others.
    """

    width: int
    dtype: str
    patches: int = 0

    def check(self, item: PromptMedia, image: EncodedImage) -> None:
        """Raises `EngineError` unless the engine can use this embedding of the item."""
        shape, expected = tuple(image.values.shape), (item.tokens, self.width)
        if shape != expected or image.dtype != self.dtype:
            raise EngineError(
                f"an embedding of the shape {shape} and the type {image.dtype} came for {item.tokens} tokens; this engine "
                f"takes {expected} and {self.dtype}. Encode workers must have the same model and type as the workers that read from them"
            )
        if not _all_finite(image):
            raise EngineError("an embedding came with numbers that are not finite")
        if image.fields and not self._fits(item, image.fields):
            missing = (
                f"count of its {item.tokens} tokens"
                if item.kind == "audio"
                else f"grid of its {item.tokens} tokens, which have {item.tokens * self.patches} patches"
            )
            raise EngineError(
                f"an embedding came without the {missing}. "
                "Encode workers must have the same model as the workers that read from them"
            )

    def _fits(self, item: PromptMedia, packed: bytes) -> bool:
        try:
            fields = msgspec.json.decode(packed, type=dict[str, Any])
            if item.kind == "audio":
                return bool(fields.get(TOKEN_COUNT) == [item.tokens])
            grids = _grids(fields)
            fits = [math.prod(grid) == item.tokens * self.patches for grid in grids]
        except (msgspec.DecodeError, TypeError):
            return False
        return not self.patches or (bool(fits) and all(fits))


def patches_per_token(item: PromptMedia, fields: Mapping[str, Any]) -> int:
    """Patches of the image's grid for each of its tokens; 0 without a grid."""
    return next((math.prod(grid) // item.tokens for grid in _grids(fields)), 0)


def _grids(fields: Mapping[str, Any]) -> list[Sequence[int]]:
    return [value for name, value in fields.items() if "grid" in name]


def _all_finite(image: EncodedImage) -> bool:
    if image.dtype == "bfloat16":
        # Infinity and what is no number have all bits of the exponent set.
        return not np.any((image.values & 0x7F80) == 0x7F80)
    return bool(np.isfinite(image.values).all())
