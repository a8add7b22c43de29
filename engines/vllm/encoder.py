"""Encode workers with vLLM: a vLLM without its language model as their `Engine`, and a vLLM that takes the embeddings they computed."""

import asyncio
import itertools
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from headwater.engines import embeddings as embedding_files
from headwater.engines import process
from headwater.engines.embeddings import EmbeddingInput, ImageEncoder, ModelEmbeddings, encoded_image
from headwater.engines.engine import (
    EncodedImage,
    EngineError,
    EngineInfo,
    EngineUnavailable,
)
from headwater.engines.media import frames_have_times, probe_item
from headwater.engines.process import interruptible
from headwater.engines.vllm.config import VllmSettings
from headwater.engines.vllm.launch import check_alive, import_vllm, launch, shut_down
from headwater.engines.vllm.media import item_prompt, media_settings, media_support
from headwater.engines.vllm.sampling import rejection_of
from headwater.schemas.media import DTYPE_BYTES, PromptMedia
from headwater.schemas.tables import EmbeddingSupport, MediaSupport

CONNECTOR: Final = "headwater.engines.vllm.embedding_connector"


def transfer_config(role: str, folder: Any) -> Any:
    """VLLM's `ECTransferConfig` for embeddings in a folder. `role`: "ec_producer" or "ec_consumer"."""
    from vllm.config.ec_transfer import ECTransferConfig

    return ECTransferConfig(
        ec_connector="EmbeddingConnector",
        ec_connector_module_path=CONNECTOR,
        ec_role=role,
        ec_connector_extra_config={"folder": str(folder)},
    )


# The engine of an encode worker.

PROCESSOR_CACHE_GIB: Final = 0.25


class VllmEncoder(ImageEncoder):
    """See `headwater.engines.engine.Engine`. Keeps up to `embeddings_mib` of embeddings."""

    name = "vllm"

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__()
        self._settings = settings
        self._engine: Any = None
        self._private: Path | None = None
        self._failure_file = ""
        self._folder = embedding_files.make_folder()
        self._frames_have_times = False
        self._numbers = itertools.count()

    async def start(self) -> EngineInfo:
        """See `Engine.start`. Raises `EngineUnavailable` also for a model with neither images nor audio."""
        settings = self._settings
        self._private = process.take("engine")
        with interruptible():
            version = import_vllm(self._private)
            self._engine, self._failure_file = launch(settings, self._private, self._complete)
        config = self._engine.vllm_config
        self._support = media_support(config)
        item = probe_item(self._support)
        if item is None:
            raise EngineUnavailable(
                f"{settings.worker.model} takes no media that could be encoded apart from it"
            )
        self.capabilities |= self._support.capabilities
        self._frames_have_times = frames_have_times(config.model_config.hf_config)
        block_size = int(config.cache_config.block_size)
        probe = await self._compute(item)
        row_bytes = probe.values.nbytes // probe.values.shape[0]
        self._open_cache(block_size, (settings.worker.embeddings_mib << 20) // (row_bytes * block_size))
        return EngineInfo(
            settings.files.name,
            block_size,
            self._blocks,
            int(config.scheduler_config.max_num_seqs),
            int(config.model_config.max_model_len),
            version=version,
            media=self._support,
            media_settings=media_settings(config),
        )

    def _complete(self, arguments: dict[str, Any]) -> None:
        # It has no KV cache. Each item is encoded under a new name, so vLLM's own cache of images would only cost memory; without any, however,
        # some releases (0.24) rename the images.
        arguments |= {
            "kv_events_config": None,
            "enable_prefix_caching": False,
            "mm_processor_cache_gb": PROCESSOR_CACHE_GIB,
            "mm_encoder_only": True,
            "ec_transfer_config": transfer_config("ec_producer", self._folder),
        }

    async def _compute(self, item: PromptMedia) -> EncodedImage:
        from vllm import SamplingParams

        name = f"{item.id}-{next(self._numbers)}"
        prompt = item_prompt(item, self._support, name)
        fields: dict[str, Any] = {}
        try:
            async for output in self._engine.generate(prompt, SamplingParams(max_tokens=1), name):
                fields = (getattr(output, "ec_transfer_params", None) or {}).get(name, {}).get(
                    "metadata"
                ) or fields
        except Exception as error:  # the boundary to vLLM
            rejection = rejection_of(error)
            if rejection is not None:
                raise rejection from error
            await self.check()
            raise EngineError(f"vLLM failed to encode: {type(error).__name__}") from error
        try:
            tensor = await asyncio.to_thread(embedding_files.take, self._folder, name)
        except FileNotFoundError:
            raise EngineError("vLLM reported no embedding") from None
        if item.kind == "video" and self._frames_have_times:
            # Its reader processes the frames as well, for their times, and encodes none of them.
            fields = {}
        return encoded_image(tensor, msgspec.json.encode(fields) if fields else b"")

    async def check(self) -> None:
        """See `Engine.check`."""
        if self._engine is not None:
            check_alive(self._engine, self._failure_file)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            shut_down(engine)
        for folder in (self._private, self._folder):
            if folder is not None:
                process.give_up(folder)


# What a model needs of an image or a video besides its embedding, as vLLM names it.


def fields_resolver(model_config: Any) -> Any:
    """Return what names a model's placeholder fields; None in releases without, whose consumers need the pixels too."""
    try:
        from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
    except ImportError:
        return None
    return PlaceholderMetadataResolver(model_config)


# A vLLM that takes embeddings: its connector, its store, and the proof that it uses them.

GIVEN_ID: Final = "1" * 32


class VllmEmbeddings(EmbeddingInput):
    """Embeddings for one engine, in files that its processes load."""

    def __init__(self, mib: int) -> None:
        folder = embedding_files.make_folder()
        super().__init__(embedding_files.FileShelf(folder), folder, mib)
        self.taken: EmbeddingSupport | None = None
        """The embeddings of images that the engine takes in place of them, once verified; None if it needs the images too."""

    def arguments(self) -> dict[str, Any]:
        """Arguments of AsyncEngineArgs."""
        return {"ec_transfer_config": transfer_config("ec_consumer", self.folder)}

    @property
    def loaded(self) -> int:
        """Embeddings that the engine has loaded."""
        return embedding_files.counted(self.folder, embedding_files.LOADED)

    async def verify(self, engine: Any, support: MediaSupport) -> None:
        """Have the engine encode an item of media, give it the result under another name, and see that it does not encode that again.

        Releases of vLLM have ignored the settings of other releases without a word. Raises `EngineUnavailable`.
        """
        probe = probe_item(support)
        if probe is None:
            return
        await _generate_one(engine, support, probe)
        try:
            tensor = embedding_files.take(self.folder, probe.id)
        except FileNotFoundError:
            raise EngineUnavailable(
                "this vLLM did not call its encoder cache connector: it cannot take the embeddings of encode workers"
            ) from None
        self.taken = _taken(engine.vllm_config.model_config, tensor)
        self.form = form_of(probe, tensor, self.taken)
        encoded = self.encoded
        given = replace(probe, id=GIVEN_ID)
        embedding_files.write(self.folder, given.id, tensor)
        try:
            await _generate_one(engine, support, given)
        finally:
            embedding_files.path_of(self.folder, given.id).unlink()
        if self.encoded != encoded or not self.loaded:
            raise EngineUnavailable(
                "this vLLM encodes an item again although it was given its embedding: it cannot use encode workers"
            )


def form_of(probe: PromptMedia, tensor: Any, support: EmbeddingSupport | None) -> ModelEmbeddings:
    """Return the form of the model's embeddings, from that of the probe item and what is known of its grid.

    Raises `EngineUnavailable` unless it has as many rows as the item has tokens.
    """
    image = encoded_image(tensor, b"")
    if tuple(tensor.shape[:-1]) != (probe.tokens,):
        raise EngineUnavailable(
            f"this model's embedding of an item with {probe.tokens} tokens has the shape {tuple(tensor.shape)}: it cannot use encode workers"
        )
    return ModelEmbeddings(int(tensor.shape[-1]), image.dtype, support.merge**2 if support is not None else 0)


async def _generate_one(engine: Any, support: MediaSupport, item: PromptMedia) -> None:
    from vllm import SamplingParams

    prompt = item_prompt(item, support, item.id)
    async for _ in engine.generate(prompt, SamplingParams(max_tokens=1), f"probe-{item.id}"):
        pass


def _taken(model: Any, embedding: Any) -> EmbeddingSupport | None:
    """Return the embeddings that a model takes if it needs only the grid of patches besides, as Qwen2-VL and its successors do; else None."""
    fields = fields_resolver(model)
    merge = getattr(getattr(model.hf_config, "vision_config", None), "spatial_merge_size", 0)
    if fields is None or set(fields.fields_for("image")) != {"image_grid_thw"} or not merge:
        return None
    dtype = str(embedding.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        return None
    return EmbeddingSupport(width=int(embedding.shape[1]), dtype=dtype, merge=int(merge))  # type: ignore[arg-type]  # one of its types, as just checked
