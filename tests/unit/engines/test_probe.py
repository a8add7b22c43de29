"""The proof at the start of a worker that its engine uses the embeddings that it is given: an engine that does not is no reader of encode workers."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.engines import embeddings as engine_embeddings
from headwater.engines.engine import EngineUnavailable
from headwater.engines.media import PROBE_ID, probe_image
from headwater.engines.sglang import embedding_input as sglang_input
from headwater.engines.vllm import encoder as vllm_input
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import ImageSupport, MediaSupport

SUPPORT = MediaSupport(images=ImageSupport(placeholder=7, per_prompt=1, tokens=4))
SCORES = [-1.0, -2.0]
OTHER = [-1.0, -9.0]


@pytest.fixture(scope="module")
def torch() -> Any:
    """Not by the module: every process that collects tests would import it."""
    return pytest.importorskip("torch")


Engine = Callable[[Path, PromptMedia, Any], None]
"""What an engine does with an item of media: the folder, the item, and its embedding."""


def encodes(folder: Path, item: PromptMedia, tensor: Any) -> None:
    """It computes, and leaves the probe's embedding in the folder."""
    engine_embeddings.count(folder, engine_embeddings.ENCODED)
    if item.id == PROBE_ID:
        engine_embeddings.write(folder, item.id, tensor)


def uses_what_it_is_given(folder: Path, item: PromptMedia, tensor: Any) -> None:
    """It computes the first time only."""
    if item.id == PROBE_ID:
        encodes(folder, item, tensor)
    else:
        engine_embeddings.count(folder, engine_embeddings.LOADED)


def ignores_its_settings(folder: Path, item: PromptMedia, tensor: Any) -> None:
    """Nobody sees what it does."""


@pytest.fixture
def embeddings() -> Iterator[vllm_input.VllmEmbeddings]:
    """Those of a vLLM."""
    made = vllm_input.VllmEmbeddings(1)
    yield made
    made.store.close()


async def verify_vllm(
    made: vllm_input.VllmEmbeddings, monkeypatch: pytest.MonkeyPatch, engine: Engine, tensor: Any
) -> None:
    """The proof, with this engine."""

    async def generate(_: object, support: MediaSupport, item: PromptMedia) -> None:
        assert support == SUPPORT
        engine(made.folder, item, tensor)

    monkeypatch.setattr(vllm_input, "_generate_one", generate)
    monkeypatch.setattr(vllm_input, "_taken", lambda *_: None)
    vllm = SimpleNamespace(vllm_config=SimpleNamespace(model_config=None))
    await made.verify(vllm, SUPPORT)


async def test_a_vllm_that_uses_an_embedding_is_a_reader(
    embeddings: vllm_input.VllmEmbeddings, monkeypatch: pytest.MonkeyPatch, torch: Any
) -> None:
    """It takes what the probe's embedding looks like, and no file of the probe is left."""
    await verify_vllm(embeddings, monkeypatch, uses_what_it_is_given, torch.ones(4, 8))
    assert embeddings.form is not None
    assert (embeddings.form.width, embeddings.form.dtype) == (8, "float32")
    assert not [one for one in os.listdir(embeddings.folder) if one.endswith(engine_embeddings.SUFFIX)]


@pytest.mark.parametrize(
    ("engine", "reason"),
    [(encodes, "encodes an item again"), (ignores_its_settings, "did not call its encoder cache connector")],
)
async def test_a_vllm_that_does_not_is_none(
    embeddings: vllm_input.VllmEmbeddings,
    monkeypatch: pytest.MonkeyPatch,
    torch: Any,
    engine: Engine,
    reason: str,
) -> None:
    """As a release that ignores the settings of another one."""
    with pytest.raises(EngineUnavailable, match=reason):
        await verify_vllm(embeddings, monkeypatch, engine, torch.ones(4, 8))


async def verify_sglang(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, tensor: Any, scores: Sequence[list[float]]
) -> None:
    """The proof, with an engine that expects the next token in this way, first after the pixels, then after the embedding."""
    made, answers = sglang_input.SglangEmbeddings(1), list(scores)

    async def score(
        _: object, prompt: Sequence[int], fields: Mapping[str, Any], more: Mapping[str, Any]
    ) -> list[float]:
        engine(made.folder, fields["item"], tensor)
        return answers.pop(0)

    async def prepare(items: Sequence[PromptMedia], given: object) -> dict[str, Any]:
        return {"item": items[0], "image_data": [{"pixel_values": 1}]}

    monkeypatch.setattr(sglang_input, "_scores", score)
    try:
        assert SUPPORT.images is not None
        await made.verify(object(), [7] * 4, probe_image(SUPPORT.images), prepare, dict)
    finally:
        made.close()


async def test_a_sglang_that_uses_an_embedding_is_a_reader(
    monkeypatch: pytest.MonkeyPatch, torch: Any
) -> None:
    """A prefill worker reports no scores: there the proof is that it encodes nothing."""
    near = [score + 0.4 for score in SCORES]
    for scores in ((SCORES, near), ([], [])):
        await verify_sglang(monkeypatch, uses_what_it_is_given, torch.ones(4, 8), scores)


@pytest.mark.parametrize(
    ("engine", "scores", "reason"),
    [
        (encodes, SCORES, "encodes an image again"),
        (ignores_its_settings, SCORES, "was not seen encoding an image"),
        (uses_what_it_is_given, OTHER, "answers otherwise"),
    ],
)
async def test_a_sglang_that_does_not_is_none(
    monkeypatch: pytest.MonkeyPatch, torch: Any, engine: Engine, scores: list[float], reason: str
) -> None:
    """The last one takes the embedding for something else."""
    with pytest.raises(EngineUnavailable, match=reason):
        await verify_sglang(monkeypatch, engine, torch.ones(4, 8), (SCORES, scores))
