"""An SGLang that takes embeddings of images and videos: its store, their form in a request, and the proof that it uses them.

SGLang takes an embedding in place of processed pixels (`precomputed_embeddings`), so that there is nothing left to encode.
Its embeddings are in the worker's memory, and are sent to the scheduler with each request, as pixels are.
"""

import copy
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import uuid4

import msgspec

from headwater.engines import embeddings as embedding_files
from headwater.engines.embeddings import (
    EmbeddingInput,
    ModelEmbeddings,
    encoded_image,
    patches_per_token,
)
from headwater.engines.engine import EngineError, EngineUnavailable
from headwater.engines.media import PROBE_ID
from headwater.schemas.media import PromptMedia, PromptMediaKind

GIVEN_ID: Final = "1" * 32
SCORED_TOKENS: Final = tuple(range(8))
SCORE_TOLERANCE: Final = 0.5
"""The largest difference between log probabilities after the same image, twice: engines compute with 8 bits, in batches of different sizes."""

FEATURE: Final = "precomputed_embeddings"

Prepare = Callable[[Sequence[PromptMedia], "Sequence[GivenEmbedding] | None"], Awaitable[dict[str, Any]]]
"""Makes the fields of a request from its images: see `SglangMedia.prepare`."""


class GivenEmbedding(NamedTuple):
    """A tensor with a row per token of an image, and what the model needs of the image besides."""

    tensor: Any
    fields: Mapping[str, Any]


class MemoryShelf:
    """Embeddings of an `EmbeddingStore` in this process."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}

    def write(self, identifier: str, tensor: Any) -> None:
        """See `Shelf.write`."""
        self.tensors[identifier] = tensor

    def remove(self, identifier: str) -> None:
        """See `Shelf.remove`."""
        self.tensors.pop(identifier, None)

    def close(self) -> None:
        """See `Shelf.close`."""
        self.tensors.clear()


class SglangEmbeddings(EmbeddingInput):
    """Embeddings for one engine, whose scheduler counts what it encodes: see `process.counting`."""

    def __init__(self, mib: int) -> None:
        self._shelf = MemoryShelf()
        super().__init__(self._shelf, embedding_files.make_folder(), mib)

    def given(self, media: Sequence[PromptMedia]) -> list[GivenEmbedding] | None:
        """The embeddings of a request's images; None if it came with pixels. Raises `EmbeddingGone`.

        A request keeps what it was given. SGLang's scheduler ends on a request with both an embedding and pixels.
        """
        fields = self.fields_of(media)
        if fields is None:
            return None
        return [
            GivenEmbedding(self._shelf.tensors[item.id], own) for item, own in zip(media, fields, strict=True)
        ]

    def close(self) -> None:
        """Drop all, and the folder of counts."""
        self.store.close()
        embedding_files.FileShelf(self.folder).close()

    async def verify(
        self,
        manager: Any,
        prompt: Sequence[int],
        probe: PromptMedia,
        prepare: Prepare,
        more: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Have the engine encode an image, give it the result under another name and without pixels, and see that it encodes nothing and
        expects the same tokens next.

        `prompt` is one with the image, `more` makes further fields of a request. Raises `EngineUnavailable`.
        """
        expected = await _scores(manager, prompt, await prepare([probe], None), more())
        try:
            tensor = embedding_files.take(self.folder, PROBE_ID)
        except FileNotFoundError:
            raise EngineUnavailable(
                "this SGLang was not seen encoding an image: whether it uses the embeddings of encode workers cannot be "
                "proved. Omit --embeddings read=true, or install SGLang 0.5.23"
            ) from None
        encoded = self.encoded
        bare = PromptMedia("image", GIVEN_ID, probe.start, probe.tokens, probe.shape)
        fields = (await prepare([probe], None))["image_data"][0]
        embedding = GivenEmbedding(
            tensor, {name: value[0].tolist() for name, value in fields_in(fields).items()}
        )
        try:
            image = encoded_image(tensor, msgspec.json.encode(embedding.fields))
            self.form = ModelEmbeddings(
                int(tensor.shape[1]), image.dtype, patches_per_token(bare, embedding.fields)
            )
            self.form.check(bare, image)
            scores = await _scores(manager, prompt, await prepare([bare], [embedding]), more())
        except (EngineError, ValueError, TypeError) as error:
            raise EngineUnavailable(f"this SGLang does not take an image's embedding: {error}") from error
        if self.encoded != encoded:
            raise EngineUnavailable(
                "this SGLang encodes an image again although it was given its embedding: it cannot use encode workers"
            )
        if not _agree(expected, scores):
            raise EngineUnavailable(
                "this SGLang answers otherwise with an image's embedding than with its pixels: it cannot use encode workers"
            )


def request_data(kind: PromptMediaKind, embeddings: Sequence[GivenEmbedding]) -> dict[str, Any]:
    """All items of a kind of a request, as SGLang takes them processed."""
    import torch

    names = embeddings[0].fields
    tensors: dict[str, Any] = {
        name: torch.tensor([embedding.fields[name] for embedding in embeddings]) for name in names
    }
    # Left out, SGLang would hash the numbers; ours is set later.
    return {
        "format": "processor_output",
        "modality": kind.upper(),
        "hash": 0,
        FEATURE: torch.cat([embedding.tensor for embedding in embeddings]),
        **tensors,
    }


def fields_in(processed: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a consumer of embeddings needs of an image processor's output: the grids by which a model numbers positions."""
    return {name: value for name, value in processed.items() if "grid" in name}


def separate(item: Any) -> Iterator[Any]:
    """SGLang's item of all embeddings of a kind in a request, as one for each of them."""
    if len(item.offsets) == 1:
        yield item
        return
    row = 0
    for place, (start, end) in enumerate(item.offsets):
        single = copy.copy(item)
        single.offsets = [(start, end)]
        rows = end - start + 1
        single.precomputed_embeddings = item.precomputed_embeddings[row : row + rows]
        single.model_specific_data = {
            name: value[place : place + 1] for name, value in item.model_specific_data.items()
        }
        row += rows
        yield single


async def _scores(
    manager: Any, prompt: Sequence[int], fields: Mapping[str, Any], more: Mapping[str, Any]
) -> list[float]:
    """The log probabilities of some tokens after a prompt with an image."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        rid=uuid4().hex,
        input_ids=list(prompt),
        sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        return_logprob=True,
        token_ids_logprob=list(SCORED_TOKENS),
        stream=False,
        **fields,
        **more,
    )
    scores: list[float] = []
    async for output in manager.generate_request(request, None):
        places = output["meta_info"].get("output_token_ids_logprobs") or []
        scores = [float(score) for score, *_ in places[0]] if places else scores
    return scores


def _agree(expected: Sequence[float], actual: Sequence[float]) -> bool:
    """A prefill worker reports no scores: that it encoded nothing is the proof there."""
    return len(expected) == len(actual) and all(
        abs(score - other) <= SCORE_TOLERANCE for score, other in zip(expected, actual, strict=True)
    )
