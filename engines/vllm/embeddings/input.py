"""A vLLM that is given the embeddings of media: its connector, its store of embeddings, and the proof that it uses them."""

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from headwater.engines.embeddings import files as embedding_files
from headwater.engines.embeddings.store import EmbeddingStore
from headwater.engines.embeddings.tensors import ModelEmbeddings, encoded_image, tensor_of
from headwater.engines.engine import EncodedImage, EngineError, EngineUnavailable
from headwater.engines.media.probe import probe_item
from headwater.engines.vllm.embeddings.config import transfer_config
from headwater.engines.vllm.embeddings.fields import fields_resolver
from headwater.engines.vllm.embeddings.prompt import item_prompt
from headwater.schemas.messages.media import DTYPE_BYTES, PromptMedia
from headwater.schemas.tables.card import EmbeddingSupport, MediaSupport

GIVEN_ID: Final = "1" * 32


class EmbeddingInput:
    """Up to `mib` MiB of embeddings for one engine."""

    def __init__(self, mib: int) -> None:
        self._folder = embedding_files.make_folder()
        self.taken: EmbeddingSupport | None = None
        """Which embeddings of images the engine takes in place of them, once verified; None where it needs the images too."""
        self.form: ModelEmbeddings | None = None
        """What the engine computes of images itself, and can be given, once verified."""
        self.store = EmbeddingStore(embedding_files.FileShelf(self._folder), mib << 20, time.monotonic)

    def arguments(self) -> dict[str, Any]:
        """Arguments of AsyncEngineArgs."""
        return {"ec_transfer_config": transfer_config("ec_consumer", self._folder)}

    @property
    def encoded(self) -> int:
        """Images that the engine has encoded itself."""
        return embedding_files.counted(self._folder, embedding_files.ENCODED)

    @property
    def loaded(self) -> int:
        """Embeddings that the engine has loaded."""
        return embedding_files.counted(self._folder, embedding_files.LOADED)

    async def put(self, item: PromptMedia, image: EncodedImage) -> None:
        """See `Engine.put_embedding`. vLLM loads what it is given unseen, and ends on what does not fit its prompt."""
        if self.form is None:
            raise EngineError("this vLLM takes no embeddings of media")
        self.form.check(item, image)
        await self.store.put(item, tensor_of(image), image.fields)

    def fields_of(self, media: Sequence[PromptMedia]) -> list[dict[str, Any]] | None:
        """What the model needs of the items besides their embeddings; None if it needs the pixels of any of them."""
        found = []
        for item in media:
            fields = self.store.fields(item)
            if not fields:
                return None
            found.append(msgspec.json.decode(fields))
        return found

    async def verify(self, engine: Any, support: MediaSupport) -> None:
        """Have the engine encode an item of media, give it the result under another name, and see that it does not encode that again.

        Releases of vLLM have ignored the settings of other releases without a word. Raises `EngineUnavailable`.
        """
        probe = probe_item(support)
        if probe is None:
            return
        await _generate_one(engine, support, probe)
        try:
            tensor = embedding_files.take(self._folder, probe.id)
        except FileNotFoundError:
            raise EngineUnavailable(
                "this vLLM did not call its encoder cache connector: it cannot take the embeddings of encode workers"
            ) from None
        self.taken = _taken(engine.vllm_config.model_config, tensor)
        self.form = form_of(probe, tensor, self.taken)
        encoded = self.encoded
        given = replace(probe, id=GIVEN_ID)
        embedding_files.write(self._folder, given.id, tensor)
        try:
            await _generate_one(engine, support, given)
        finally:
            embedding_files.path_of(self._folder, given.id).unlink()
        if self.encoded != encoded or not self.loaded:
            raise EngineUnavailable(
                "this vLLM encodes an item again although it was given its embedding: it cannot use encode workers"
            )


def form_of(probe: PromptMedia, tensor: Any, taken: EmbeddingSupport | None) -> ModelEmbeddings:
    """From the embedding of the probe item, and what is known of its grid. Raises `EngineUnavailable` for another number of rows than tokens."""
    image = encoded_image(tensor, b"")
    if tuple(tensor.shape[:-1]) != (probe.tokens,):
        raise EngineUnavailable(
            f"this model's embedding of an item with {probe.tokens} tokens has the shape {tuple(tensor.shape)}: it cannot use encode workers"
        )
    return ModelEmbeddings(int(tensor.shape[-1]), image.dtype, taken.merge**2 if taken is not None else 0)


async def _generate_one(engine: Any, support: MediaSupport, item: PromptMedia) -> None:
    from vllm import SamplingParams

    prompt = item_prompt(item, support, item.id)
    async for _ in engine.generate(prompt, SamplingParams(max_tokens=1), f"probe-{item.id}"):
        pass


def _taken(model: Any, embedding: Any) -> EmbeddingSupport | None:
    """Of a model that needs nothing but the grid of an image's patches besides its embedding, as Qwen2-VL and its successors do."""
    fields = fields_resolver(model)
    merge = getattr(getattr(model.hf_config, "vision_config", None), "spatial_merge_size", 0)
    if fields is None or set(fields.fields_for("image")) != {"image_grid_thw"} or not merge:
        return None
    dtype = str(embedding.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        return None
    return EmbeddingSupport(width=int(embedding.shape[1]), dtype=dtype, merge=int(merge))  # type: ignore[arg-type]  # one of its types, as just checked
