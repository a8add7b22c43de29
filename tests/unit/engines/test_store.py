"""Embeddings for an engine stay as long as a request may need them, and no longer than there is room."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.engines import embeddings as embedding_files
from headwater.engines.embeddings import (
    LINGER_S,
    PROMISED_S,
    EmbeddingGone,
    EmbeddingInput,
    EmbeddingStore,
    FileShelf,
    StoreFull,
)
from headwater.engines.engine import EngineError
from headwater.schemas.media import PromptMedia

ROWS, WIDTH = 5, 8
NBYTES = ROWS * WIDTH * 4


class Clock:
    """Seconds that a test moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


def image(name: str) -> PromptMedia:
    """An image."""
    return PromptMedia("image", name * 32, 0, ROWS, (28, 28, 3))


def tensor(value: float, dtype: str = "float32") -> Any:
    """An embedding."""
    # Not by the module: every process that collects tests would import torch.
    torch = pytest.importorskip("torch")
    return torch.full((ROWS, WIDTH), value, dtype=getattr(torch, dtype))


@pytest.fixture
def clock() -> Clock:
    """At a second."""
    return Clock()


@pytest.fixture
def folder() -> Path:
    """Where the embeddings are."""
    return embedding_files.make_folder()


@pytest.fixture
def store(clock: Clock, folder: Path) -> Iterator[EmbeddingStore]:
    """With room for two."""
    made = EmbeddingStore(embedding_files.FileShelf(folder), 2 * NBYTES, clock)
    yield made
    made.close()
    assert not folder.exists()


def files(folder: Path) -> set[str]:
    """Names of the embeddings in the folder, by their first letter."""
    return {path.name[0] for path in folder.glob(f"*{embedding_files.SUFFIX}")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_what_is_put_is_what_an_engine_reads(store: EmbeddingStore, dtype: str, folder: Path) -> None:
    """Values and type."""
    given = tensor(1.5, dtype)
    await store.put(image("a"), given, b"{}")
    read = embedding_files.read(folder, image("a").id)
    assert read.dtype == given.dtype
    assert read.equal(given)
    assert store.fields(image("a")) == b"{}"
    assert store.fields(image("b")) is None


async def test_an_embedding_in_use_is_never_removed(
    store: EmbeddingStore, clock: Clock, folder: Path
) -> None:
    """However old it is: vLLM loads it again after a preemption."""
    await store.put(image("a"), tensor(1), b"")
    await store.put(image("b"), tensor(2), b"")
    pinned = store.pin([image("a"), image("c")])
    clock.now_s += 10 * LINGER_S
    await store.put(image("c"), tensor(3), b"")
    assert files(folder) == {"a", "c"}
    with pytest.raises(StoreFull, match="in use"):
        await store.put(image("d"), tensor(4), b"")
    store.unpin(pinned, was_cancelled=False)
    await store.put(image("d"), tensor(4), b"")
    # The one that was promised to a request stays.
    assert files(folder) == {"c", "d"}
    assert store.nbytes == 2 * NBYTES


async def test_an_embedding_lingers_after_a_cancelled_request(
    store: EmbeddingStore, clock: Clock, folder: Path
) -> None:
    """Which may still be in the engine's queue. Another request that ends well shortens nothing."""
    await store.put(image("a"), tensor(1), b"")
    first, second = store.pin([image("a")]), store.pin([image("a")])
    store.unpin(first, was_cancelled=True)
    store.unpin(second, was_cancelled=False)
    await store.put(image("b"), tensor(1), b"")
    clock.now_s += LINGER_S - 1
    await store.put(image("c"), tensor(1), b"")
    assert files(folder) == {"a", "c"}
    clock.now_s += PROMISED_S
    await store.put(image("d"), tensor(1), b"")
    assert files(folder) == {"c", "d"}


async def test_an_embedding_that_was_found_stays_until_its_request_comes(
    store: EmbeddingStore, clock: Clock, folder: Path
) -> None:
    """Not for a minute: then a worker could take only as many different images a minute as it has room for."""
    await store.put(image("a"), tensor(1), b"")
    await store.put(image("b"), tensor(1), b"")
    with pytest.raises(StoreFull):
        await store.put(image("c"), tensor(1), b"")
    clock.now_s += PROMISED_S - 1
    assert store.fields(image("a")) is not None
    clock.now_s += 1
    await store.put(image("c"), tensor(1), b"")
    assert files(folder) == {"a", "c"}
    clock.now_s += PROMISED_S
    await store.put(image("d"), tensor(1), b"")
    assert files(folder) == {"c", "d"}


async def test_an_embedding_that_cannot_be_written_takes_no_room(store: EmbeddingStore, folder: Path) -> None:
    """Containers often have only 64 MiB of shared memory."""
    shutil.rmtree(folder)
    with pytest.raises(EngineError, match="cannot be written"):
        await store.put(image("a"), tensor(1), b"")
    assert (store.nbytes, len(store)) == (0, 0)


async def test_one_that_is_being_written_is_not_written_again(store: EmbeddingStore) -> None:
    """Whatever becomes of the request that began it."""
    first = asyncio.ensure_future(store.put(image("a"), tensor(1), b"x"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(*(store.put(image("a"), tensor(2), b"y") for _ in range(3)))
    assert store.fields(image("a")) == b"x"
    assert store.nbytes == NBYTES


async def test_putting_one_again_changes_nothing(store: EmbeddingStore) -> None:
    """Two requests with the same image may both have read it."""
    await store.put(image("a"), tensor(1), b"x")
    await store.put(image("a"), tensor(2), b"y")
    assert store.fields(image("a")) == b"x"
    assert store.nbytes == NBYTES


def test_a_request_whose_embedding_went_is_tried_again(tmp_path: Path) -> None:
    """VLLM's engine would end on an image with neither pixels nor embedding."""
    with pytest.raises(EmbeddingGone) as raised:
        EmbeddingInput(FileShelf(tmp_path), tmp_path, 1).fields_of([image("a")])
    assert raised.value.retryable
