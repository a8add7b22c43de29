"""Embeddings as SGLang takes them, and how its encodings are counted: without SGLang."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headwater.engines import embeddings as embedding_files
from headwater.engines.embeddings import EmbeddingGone, ModelEmbeddings, encoded_image, tensor_of
from headwater.engines.engine import EncodedImage, EngineError, EngineUnavailable
from headwater.engines.media import PROBE_ID
from headwater.engines.sglang import process
from headwater.engines.sglang.embedding_input import GivenEmbedding, SglangEmbeddings, fields_in, request_data
from headwater.engines.sglang.encoder import check_parts
from headwater.engines.sglang.media import single_items
from headwater.schemas.media import PromptMedia, PromptMediaKind

ROWS, WIDTH = 4, 8
GRID = b'{"image_grid_thw":[1,4,4]}'


def image(id_: str, data: bytes = b"") -> PromptMedia:
    """An image of four tokens."""
    return PromptMedia("image", id_ * 32, 3, ROWS, (28, 28, 3), data)


def embedding(value: float, rows: int = ROWS, width: int = WIDTH, fields: bytes = GRID) -> EncodedImage:
    """One that an encode worker sends."""
    return EncodedImage(np.full((rows, width), value, np.float32), "float32", fields)


@pytest.fixture(scope="module")
def torch() -> Any:
    """Imported by these tests only, which run in one worker: with the module, each worker would while it collects."""
    return pytest.importorskip("torch")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[SglangEmbeddings]:
    """Of an engine that has been found to take rows of eight numbers."""
    made = SglangEmbeddings(1)
    made.form = ModelEmbeddings(WIDTH, "float32", 4)
    yield made
    made.close()
    assert not made.folder.exists()


async def test_a_request_gets_embeddings_for_all_of_its_images_or_for_none(store: SglangEmbeddings) -> None:
    """SGLang's scheduler ends on a request with both."""
    a, b = image("a"), image("b")
    await store.put(a, embedding(1))
    assert store.holds(a)
    with pytest.raises(EmbeddingGone):
        store.given([a, b])
    await store.put(b, embedding(2))
    found = store.given([b, a])
    assert found is not None
    assert [float(one.tensor[0, 0]) for one in found] == [2.0, 1.0]
    assert found[0].fields == {"image_grid_thw": [1, 4, 4]}
    assert store.given([a, replace(b, data=b"pixels")]) is None
    assert store.given([]) is None


async def test_embeddings_that_this_model_cannot_use_are_not_taken(store: SglangEmbeddings) -> None:
    """Of other rows or widths; without fields the pixels are needed too."""
    for wrong in (embedding(1, rows=3), embedding(1, width=7)):
        with pytest.raises(EngineError, match="must have the same model"):
            await store.put(image("a"), wrong)
    assert not store.holds(image("a"))
    await store.put(image("b"), embedding(1, fields=b""))
    assert not store.holds(image("b"))


@pytest.mark.parametrize("kind", ["image", "video"])
def test_the_items_of_a_request_are_bundled_and_separated_again(torch: Any, kind: PromptMediaKind) -> None:
    """By the rows that each has in the prompt, with its own grid."""
    grid = f"{kind}_grid_thw"
    given = [
        GivenEmbedding(torch.full((rows, WIDTH), float(rows)), {grid: [1, 2, rows * 2]}) for rows in (4, 6)
    ]
    data = request_data(kind, given)
    assert data["modality"] == kind.upper()
    assert data["precomputed_embeddings"].shape == (10, WIDTH)
    assert data[grid].tolist() == [[1, 2, 8], [1, 2, 12]]
    bundle = SimpleNamespace(
        precomputed_embeddings=data["precomputed_embeddings"],
        offsets=[(5, 8), (11, 16)],
        model_specific_data={grid: data[grid]},
    )
    first, second = single_items(bundle)
    for one, expected in ((first, given[0]), (second, given[1])):
        assert torch.equal(one.precomputed_embeddings, expected.tensor)
        assert one.model_specific_data[grid].tolist() == [expected.fields[grid]]
    assert (first.offsets, second.offsets) == ([(5, 8)], [(11, 16)])
    assert list(single_items(first)) == [first]


def test_images_with_pixels_are_left_as_they_are() -> None:
    """SGLang bundles none of those."""
    pixels = SimpleNamespace(
        precomputed_embeddings=None, offsets=[(20, 21), (23, 24)], model_specific_data={}
    )
    assert list(single_items(pixels)) == [pixels]


def test_only_grids_are_sent_along() -> None:
    """A reader of another engine takes exactly these."""
    assert fields_in({"pixel_values": 1, "image_grid_thw": 2, "attention_mask": 3}) == {"image_grid_thw": 2}


class Model:
    """A model's encoder, and SGLang's function that calls it."""

    def __init__(self, torch: Any) -> None:
        self.calls: list[int] = []
        self._torch = torch

    def get_image_feature(self, items: list[Any]) -> Any:
        """Encode."""
        self.calls.append(len(items))
        return self._torch.ones(len(items) * ROWS, WIDTH)

    @staticmethod
    def embed(*, data_embedding_func: Any, items: list[Any]) -> Any:
        """It looks at who owns the function, as SGLang does."""
        assert isinstance(data_embedding_func.__self__, Model)
        assert data_embedding_func.__name__ == "get_image_feature"
        return data_embedding_func(items) if items else None


def test_each_encoding_is_counted_and_the_probe_is_written(torch: Any, tmp_path: Path) -> None:
    """Also several at once; nothing without one. A folder that is gone ends no scheduler."""
    model = Model(torch)
    embed = process.counting(Model.embed, tmp_path)
    probe, other = SimpleNamespace(hash=0), SimpleNamespace(hash=7)
    for items in ([], [other, other], [probe]):
        embed(data_embedding_func=model.get_image_feature, items=items)
    assert model.calls == [2, 1]
    assert embedding_files.counted(tmp_path, embedding_files.ENCODED) == 3
    assert embedding_files.take(tmp_path, PROBE_ID).shape == (ROWS, WIDTH)
    gone = process.counting(Model.embed, tmp_path / "gone")
    assert gone(data_embedding_func=model.get_image_feature, items=[probe]).shape == (ROWS, WIDTH)


def test_only_processes_that_are_started_within_it_count(tmp_path: Path) -> None:
    """Another engine of the same process would count for this one."""
    with process.announced(tmp_path):
        assert os.environ[process.VARIABLE] == str(tmp_path)
    assert process.VARIABLE not in os.environ
    with process.announced(None):
        assert process.VARIABLE not in os.environ


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_and_what_is_sent_of_them(torch: Any, dtype: str) -> None:
    """The same numbers and type."""
    tensor = torch.tensor([[1.5, -2.0]], dtype=getattr(torch, dtype))
    sent = encoded_image(tensor, GRID)
    assert (sent.dtype, sent.fields) == (dtype, GRID)
    assert torch.equal(tensor_of(sent), tensor)


@pytest.mark.parametrize("name", ["tp_size", "dp_size", "pp_size", "nnodes"])
def test_an_encoder_has_one_process(name: str) -> None:
    """Others are rejected by name."""
    check_parts({name: 1})
    with pytest.raises(EngineUnavailable, match=f"--{name.replace('_', '-')} 2"):
        check_parts({name: 2})
