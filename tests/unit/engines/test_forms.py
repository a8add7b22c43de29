"""Which embeddings an engine is given: those that look like what it computes itself. It would end on others, or answer wrongly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engines.embeddings import ModelEmbeddings, patches_per_token
from headwater.engines.engine import EncodedImage, EngineError, EngineUnavailable
from headwater.engines.sim.model import FORM, embedding_of
from headwater.engines.vllm.encoder import VllmEmbeddings, form_of
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import EmbeddingSupport

TOKENS, WIDTH = 64, 8
ITEM = PromptMedia("image", "a" * 32, 0, TOKENS, (224, 224, 3))
GRID = b'{"image_grid_thw":[1,16,16]}'


def embedding(values: Any = None, fields: bytes = GRID, dtype: Any = "float32") -> EncodedImage:
    """One that fits, unless said otherwise."""
    return EncodedImage(np.ones((TOKENS, WIDTH), np.float32) if values is None else values, dtype, fields)


def spoiled(value: float, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """One number among many."""
    values = np.ones((TOKENS, WIDTH), dtype)
    values[TOKENS // 2, 3] = value
    return values


WRONG = {
    "a small one": (embedding(np.ones((3, 7), np.float32)), "shape"),
    "fewer rows": (embedding(np.ones((TOKENS - 1, WIDTH), np.float32)), "shape"),
    "more rows": (embedding(np.ones((TOKENS + 1, WIDTH), np.float32)), "shape"),
    "another width": (embedding(np.ones((TOKENS, WIDTH + 1), np.float32)), "shape"),
    "one dimension": (embedding(np.ones(TOKENS * WIDTH, np.float32)), "shape"),
    "another type": (embedding(np.ones((TOKENS, WIDTH), np.float16), dtype="float16"), "float16"),
    "numbers of another size": (embedding(np.ones((TOKENS, WIDTH), np.float64), dtype="float64"), "float64"),
    "not a number": (embedding(spoiled(np.nan)), "not finite"),
    "infinity": (embedding(spoiled(-np.inf)), "not finite"),
    "a larger image's grid": (embedding(fields=b'{"image_grid_thw":[1,32,16]}'), "grid"),
    "a grid of words": (embedding(fields=b'{"image_grid_thw":["a",2,3]}'), "grid"),
    "a number for a grid": (embedding(fields=b'{"image_grid_thw":256}'), "grid"),
    "no grid": (embedding(fields=b"{}"), "grid"),
    "unreadable fields": (embedding(fields=b"{"), "grid"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_an_embedding_that_is_not_the_engines_own_is_not_taken(wrong: str, tmp_path: Path) -> None:
    """By vLLM's store, which writes nothing."""
    image, message = WRONG[wrong]
    given = VllmEmbeddings(1)
    try:
        with pytest.raises(EngineError, match="takes no embeddings"):
            await given.put(ITEM, embedding())
        given.form = ModelEmbeddings(WIDTH, "float32", 4)
        with pytest.raises(EngineError, match=message):
            await given.put(ITEM, image)
        assert given.store.fields(ITEM) is None
    finally:
        given.store.close()


async def test_one_that_fits_is_taken() -> None:
    """With the fields that the model needs."""
    pytest.importorskip("safetensors.torch")
    given = VllmEmbeddings(1)
    given.form = ModelEmbeddings(WIDTH, "float32", 4)
    try:
        await given.put(ITEM, embedding())
        assert given.fields_of([ITEM]) == [{"image_grid_thw": [1, 16, 16]}]
    finally:
        given.store.close()


def test_a_clip_has_a_count_of_tokens_in_place_of_a_grid() -> None:
    """Also for a model whose images have grids; one that needs no count gets none."""
    form = ModelEmbeddings(WIDTH, "float32", 4)
    clip = PromptMedia("audio", "c" * 32, 0, TOKENS, (TOKENS * 640,))
    form.check(clip, embedding(fields=b'{"audio_num_tokens":[64]}'))
    form.check(clip, embedding(fields=b""))
    for wrong in (b'{"audio_num_tokens":[63]}', b'{"audio_num_tokens":64}', GRID, b"{"):
        with pytest.raises(EngineError, match="without the count of its 64 tokens"):
            form.check(clip, embedding(fields=wrong))


def test_numbers_of_sixteen_bits_are_looked_at() -> None:
    """Their bits come as integers."""
    form = ModelEmbeddings(WIDTH, "bfloat16")
    for bits, fits in ((0x3F80, True), (0xFF7F, True), (0x7F80, False), (0xFF80, False), (0x7FC0, False)):
        image = embedding(spoiled(bits, np.uint16), b"", "bfloat16")
        if fits:
            form.check(ITEM, image)
        else:
            with pytest.raises(EngineError, match="not finite"):
                form.check(ITEM, image)


def test_the_form_is_that_of_the_probe_image() -> None:
    """One row for each of its tokens, or the model cannot be given embeddings."""
    torch = pytest.importorskip("torch")
    taken = EmbeddingSupport(width=WIDTH, dtype="bfloat16", merge=2)
    rows = torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16)
    assert form_of(ITEM, rows, taken) == ModelEmbeddings(WIDTH, "bfloat16", 4)
    assert form_of(ITEM, rows, None) == ModelEmbeddings(WIDTH, "bfloat16", 0)
    with pytest.raises(EngineUnavailable, match="cannot use encode workers"):
        form_of(ITEM, rows[1:], taken)
    assert patches_per_token(ITEM, {"image_grid_thw": [1, 16, 16]}) == 4
    assert patches_per_token(ITEM, {"sizes": [1]}) == 0


def test_the_simulated_engines_own_embeddings_fit() -> None:
    """And no others."""
    item = PromptMedia("image", "b" * 32, 0, 4, (28, 28, 3), bytes(28 * 28 * 3))
    FORM.check(item, EncodedImage(embedding_of(item), "float32"))
    with pytest.raises(EngineError, match="shape"):
        FORM.check(item, EncodedImage(embedding_of(item)[1:], "float32"))
