"""SGLang's vision encoder, as the `Engine` of an encode worker: images in, embeddings out.

SGLang has servers that only encode (`--encoder-only`), whose answers go to its own schedulers. Here the part of such a server that loads and
computes runs in this process, in a thread; what it computes is kept and offered as that of other encode workers.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from headwater.engines.embeddings.encoder import ImageEncoder
from headwater.engines.embeddings.tensors import encoded_image
from headwater.engines.engine import EncodedImage, EngineDied, EngineError, EngineInfo, EngineUnavailable
from headwater.engines.heap import freeze_heap
from headwater.engines.media.image_rule import PROBES, black_image, fitting_rule, placeholder_of
from headwater.engines.media.prompt import image_of
from headwater.engines.sglang.config import cli_arguments, disaggregation, versions
from headwater.engines.sglang.config.arguments import SglangSettings, keyword_arguments
from headwater.engines.sglang.embeddings.input import fields_in
from headwater.engines.sglang.learn_media import PER_PROMPT
from headwater.engines.sglang.media import media_settings
from headwater.engines.sglang.process import import_sglang
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.card import MediaSupport

HOST = "127.0.0.1"


class SglangEncoder(ImageEncoder):
    """See `headwater.engines.engine.Engine`. Keeps up to `settings.embeddings_mib` of embeddings."""

    name = "sglang"

    def __init__(self, settings: SglangSettings) -> None:
        super().__init__()
        self._settings = settings
        self._encoder: Any = None
        self._failure = ""
        # Images are encoded one after the other; PyTorch computes outside of the interpreter's lock.
        self._thread = ThreadPoolExecutor(1, "encode")

    async def start(self) -> EngineInfo:
        """See `Engine.start`. Raises `EngineUnavailable` also for a model whose images SGLang does not encode apart from it."""
        version, settings = versions.installed(), self._settings
        cpu = import_sglang()
        given = cli_arguments.parse(settings.native)
        check_parts(given)
        arguments = keyword_arguments(settings, given, "", "", cpu=cpu)
        del arguments["kv_events_config"]
        arguments["encoder_only"] = True
        try:
            self._encoder = _load(arguments)
            found = {size: self._encode(black_image(*size)) for size in PROBES}
        except Exception as error:  # whatever SGLang raises while it starts, it did not start
            raise EngineUnavailable(
                f"SGLang cannot encode the images of {settings.model} apart from it: {type(error).__name__}: {error}"
            ) from error
        model = self._encoder.model_config
        support = fitting_rule(
            model.hf_config,
            self._encoder.preprocessor.image_processor,
            placeholder=placeholder_of(model.hf_config) or 0,
            limit=PER_PROMPT,
            found={size: len(image.values) for size, image in found.items()},
        )
        if support is None:
            raise EngineUnavailable(f"{settings.model} takes no images that could be encoded apart from it")
        row_bytes = found[PROBES[0]].values[0].nbytes
        page_size = int(arguments["page_size"])
        self._open_cache(page_size, (settings.embeddings_mib << 20) // (row_bytes * page_size))
        freeze_heap()
        return EngineInfo(
            settings.name,
            page_size,
            self._blocks,
            1,
            int(model.context_len),
            version=version,
            media=MediaSupport(support),
            media_settings=media_settings(arguments),
        )

    async def _compute(self, item: PromptMedia) -> EncodedImage:
        image = image_of(item)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, image)
        except Exception as error:  # the boundary to SGLang
            if _is_lasting(error):
                self._failure = f"{type(error).__name__}: {error}"
                await self.check()
            raise EngineError(f"SGLang failed to encode: {type(error).__name__}") from error

    def _encode(self, image: Any) -> EncodedImage:
        """The embedding of an image of Pillow; called in a thread."""
        import torch
        from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

        encoder = self._encoder
        preprocessor = encoder.preprocessor
        config = preprocessor.vision_config.get("image", {})
        processed = preprocessor.image_processor(images=[image], return_tensors="pt", **config)
        pixels, fields = processed["pixel_values"], fields_in(processed)
        item = MultimodalDataItem(modality=Modality.IMAGE, feature=pixels.to(encoder.device))
        for name, value in fields.items():
            item.set(name, value)
        with torch.inference_mode():
            rows = encoder.model.get_image_feature([item])
            tensor = rows.reshape(-1, rows.shape[-1]).contiguous().cpu()
        packed = msgspec.json.encode({name: value[0].tolist() for name, value in fields.items()})
        return encoded_image(tensor, packed if fields else b"")

    async def check(self) -> None:
        """See `Engine.check`."""
        if self._failure:
            raise EngineDied(f"SGLang's encoder failed: {self._failure}")

    async def stop(self) -> None:
        """See `Engine.stop`. The model's memory is freed with the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def check_parts(given: Mapping[str, Any]) -> None:
    """Raises `EngineUnavailable` for arguments that an encoder in one process cannot follow."""
    for name in ("tp_size", "dp_size", "pp_size", "nnodes"):
        if int(given.get(name) or 1) > 1:
            flag = name.replace("_", "-")
            raise EngineUnavailable(
                f"--role encode with --{flag} {given[name]} is not implemented: start several encode workers"
            )


def _load(arguments: Mapping[str, Any]) -> Any:
    """SGLang's encoder, loaded."""
    from sglang.srt.disaggregation.encoder.server import MMEncoder
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    given = ServerArgs(**arguments)
    publish(given, role="encoder")
    return MMEncoder(given, dist_init_method=f"tcp://{HOST}:{disaggregation.free_port(HOST)}")


def _is_lasting(error: Exception) -> bool:
    """After an error of its device a process can compute nothing more."""
    import torch

    lasting = getattr(torch, "AcceleratorError", None)
    return (lasting is not None and isinstance(error, lasting)) or "CUDA error" in str(error)
