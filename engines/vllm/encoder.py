"""vLLM without its language model, as the `Engine` of an encode worker: images, videos and audio in, embeddings out."""

import asyncio
import itertools
from pathlib import Path
from typing import Any, Final

import msgspec

from headwater.engines.embeddings import files as embedding_files
from headwater.engines.embeddings.encoder import ImageEncoder
from headwater.engines.embeddings.tensors import encoded_image
from headwater.engines.engine import (
    EncodedImage,
    EngineError,
    EngineInfo,
    EngineUnavailable,
    RequestRejected,
)
from headwater.engines.media.probe import probe_item
from headwater.engines.media.video_rule import frames_have_times
from headwater.engines.process import private_folder
from headwater.engines.process.interruption import interruptible
from headwater.engines.vllm.config.arguments import VllmSettings
from headwater.engines.vllm.embeddings.config import transfer_config
from headwater.engines.vllm.embeddings.prompt import item_prompt
from headwater.engines.vllm.launch import check_alive, import_vllm, launch, shut_down
from headwater.engines.vllm.media import media_settings, media_support
from headwater.engines.vllm.rejections import rejection_of
from headwater.schemas.media_kind import SEVERAL
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.card import MediaSupport

PROCESSOR_CACHE_GIB: Final = 0.25


class VllmEncoder(ImageEncoder):
    """See `headwater.engines.engine.Engine`. Keeps up to `settings.embeddings_mib` of embeddings."""

    name = "vllm"

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__()
        self._settings = settings
        self._engine: Any = None
        self._private: Path | None = None
        self._failure_file = ""
        self._folder = embedding_files.make_folder()
        self._support = MediaSupport()
        self._frames_have_times = False
        self._numbers = itertools.count()

    async def start(self) -> EngineInfo:
        """See `Engine.start`. Raises `EngineUnavailable` also for a model with neither images nor audio."""
        settings = self._settings
        self._private = private_folder.take("engine")
        with interruptible():
            version = import_vllm()
            self._engine, self._failure_file = launch(settings, self._private, self._complete)
        config = self._engine.vllm_config
        self._support = media_support(config)
        item = probe_item(self._support)
        if item is None:
            raise EngineUnavailable(f"{settings.model} takes no media that could be encoded apart from it")
        self.capabilities |= self._support.capabilities
        self._frames_have_times = frames_have_times(config.model_config.hf_config)
        block_size = int(config.cache_config.block_size)
        probe = await self._compute(item)
        row_bytes = probe.values.nbytes // probe.values.shape[0]
        self._open_cache(block_size, (settings.embeddings_mib << 20) // (row_bytes * block_size))
        return EngineInfo(
            settings.name,
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

        if item.kind not in self._support.placeholders:
            raise RequestRejected(f"this encode worker takes no {SEVERAL[item.kind]}", param="messages")
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
                private_folder.give_up(folder)
