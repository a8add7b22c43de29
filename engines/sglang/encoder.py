"""SGLang's vision encoder, as the `Engine` of an encode worker: images and videos in, embeddings out.

SGLang has servers that only encode (`--encoder-only`), whose answers go to its own schedulers. Here the part of such a server that loads and
computes runs in this process, in a thread; what it computes is kept and offered as that of other encode workers.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple

import msgspec

from headwater.engines import logs
from headwater.engines.embeddings import ImageEncoder, encoded_image
from headwater.engines.engine import (
    EncodedImage,
    EngineDied,
    EngineError,
    EngineInfo,
    EngineUnavailable,
    start_failure,
)
from headwater.engines.media import (
    PROBES,
    black_image,
    black_video,
    fitting_rule,
    fitting_video_rule,
    frames_have_times,
    image_of,
    learned,
    placeholder_of,
    probes,
    values_of,
)
from headwater.engines.process import EngineInterrupted, freeze_heap, interruptible
from headwater.engines.sglang import (
    config as sglang_config,
)
from headwater.engines.sglang.config import SglangSettings, keyword_arguments
from headwater.engines.sglang.embedding_input import fields_in
from headwater.engines.sglang.media import PER_PROMPT, frames_of, media_settings, without_sampling
from headwater.engines.sglang.process import import_sglang
from headwater.schemas.media import PromptMedia, PromptMediaKind
from headwater.schemas.names import host_port
from headwater.schemas.tables import MediaSupport, VideoSupport

HOST = "127.0.0.1"

SMALL_VIDEO: Final = (2, 64, 64)
"""Encoded at the start, to see that SGLang encodes videos apart from the model."""


class _EncodedKind(NamedTuple):
    """How SGLang encodes a kind: the field of the processor's output, its modality, and the model's method."""

    feature: str
    modality: str
    method: str


ENCODINGS: Final[dict[PromptMediaKind, _EncodedKind]] = {
    "image": _EncodedKind("pixel_values", "IMAGE", "get_image_feature"),
    "video": _EncodedKind("pixel_values_videos", "VIDEO", "get_video_feature"),
}


class SglangEncoder(ImageEncoder):
    """See `headwater.engines.engine.Engine`. Keeps up to `embeddings_mib` of embeddings."""

    name = "sglang"

    def __init__(self, settings: SglangSettings) -> None:
        super().__init__()
        self._settings = settings
        self._encoder: Any = None
        self._video_settings: dict[str, Any] = {}
        self._failure = ""
        # Images are encoded one after the other; PyTorch computes outside of the interpreter's lock.
        self._thread = ThreadPoolExecutor(1, "encode")

    async def start(self) -> EngineInfo:
        """See `Engine.start`. Raises `EngineUnavailable` also for a model whose images SGLang does not encode apart from it."""
        version, settings = sglang_config.installed(), self._settings
        with interruptible():
            cpu = import_sglang()
        native_options = sglang_config.parse(settings.options.native)
        check_parts(native_options)
        arguments = keyword_arguments(settings, native_options, "", "", cpu=cpu)
        del arguments["kv_events_config"]
        arguments["encoder_only"] = True
        try:
            with interruptible():
                self._encoder = _load(arguments)
            encoded = {size: self._encode("image", black_image(*size)) for size in PROBES}
        except EngineInterrupted:
            raise
        except Exception as error:  # whatever SGLang raises while it starts, it did not start
            failure = f"SGLang cannot encode the images of {settings.worker.model} apart from it: {type(error).__name__}"
            raise start_failure(failure, error) from error
        model = self._encoder.model_config
        support = fitting_rule(
            model.hf_config,
            self._encoder.preprocessor.image_processor,
            placeholder=placeholder_of(model.hf_config) or 0,
            limit=PER_PROMPT,
            found={size: len(image.values) for size, image in encoded.items()},
        )
        if support is None:
            raise EngineUnavailable(
                f"{settings.worker.model} takes no images that could be encoded apart from it"
            )
        videos = self._learn_videos((arguments.get("mm_process_config") or {}).get("video") or {})
        self._support = MediaSupport(support, videos)
        if videos is not None:
            self.capabilities |= {"videos"}
        row_bytes = encoded[PROBES[0]].values[0].nbytes
        page_size = int(arguments["page_size"])
        self._open_cache(page_size, (settings.worker.embeddings_mib << 20) // (row_bytes * page_size))
        freeze_heap()
        return EngineInfo(
            settings.files.name,
            page_size,
            self._blocks,
            1,
            int(model.context_len),
            version=version,
            media=self._support,
            media_settings=media_settings(arguments),
        )

    def _learn_videos(self, settings: Mapping[str, Any]) -> VideoSupport | None:
        """The rule of videos' tokens. None for a model without, and one that needs more of a video than its embedding and its grid.

        `settings` are those of SGLang's `--mm-process-config` for videos.
        """
        model, processor = self._encoder.model_config.hf_config, self._encoder.preprocessor.video_processor
        placeholder, frames = placeholder_of(model, "video"), frames_of(settings)
        if placeholder is None or processor is None or frames_have_times(model):
            return None
        self._video_settings = without_sampling(settings)

        def learn() -> VideoSupport | None:
            encoded = self._encode("video", black_video(SMALL_VIDEO))
            patches = prod(self._process("video", black_video(SMALL_VIDEO))["video_grid_thw"][0].tolist())
            merged = patches // len(encoded.values)
            grids = {
                size: self._process("video", black_video(size))["video_grid_thw"][0].tolist()
                for size in probes(frames)
            }
            return fitting_video_rule(
                model,
                processor,
                placeholder=placeholder,
                limit=PER_PROMPT,
                frames=frames,
                found={size: prod(grid) // merged for size, grid in grids.items()},
            )

        return learned("video", self._settings.worker.model, learn)

    async def _compute(self, item: PromptMedia) -> EncodedImage:
        values = image_of(item) if item.kind == "image" else values_of(item)
        encode = partial(self._encode, item.kind, values)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, encode)
        except Exception as error:  # the boundary to SGLang
            if _is_lasting(error):
                self._failure = f"{type(error).__name__}: {error}"
                await self.check()
            raise EngineError(f"SGLang failed to encode: {type(error).__name__}") from error

    def _process(self, kind: PromptMediaKind, values: Any) -> Any:
        """Return what the model's own processor makes of an image of Pillow, or of the frames of a video."""
        preprocessor = self._encoder.preprocessor
        if kind == "video":
            return preprocessor.video_processor(videos=[values], return_tensors="pt", **self._video_settings)
        config = preprocessor.vision_config.get("image", {})
        return preprocessor.image_processor(images=[values], return_tensors="pt", **config)

    def _encode(self, kind: PromptMediaKind, values: Any) -> EncodedImage:
        """The embedding of an image or a video, as `_process` takes it; called in a thread."""
        import torch
        from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

        encoder, how = self._encoder, ENCODINGS[kind]
        processed = self._process(kind, values)
        pixels, fields = processed[how.feature], fields_in(processed)
        item = MultimodalDataItem(modality=Modality[how.modality], feature=pixels.to(encoder.device))
        for name, value in fields.items():
            item.set(name, value)
        with torch.inference_mode():
            rows = getattr(encoder.model, how.method)([item])
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


def check_parts(native_options: Mapping[str, Any]) -> None:
    """Raises `EngineUnavailable` for arguments that an encoder in one process cannot follow."""
    for name in ("tp_size", "dp_size", "pp_size", "nnodes"):
        if int(native_options.get(name) or 1) > 1:
            flag = name.replace("_", "-")
            raise EngineUnavailable(
                f"--role encode with --{flag} {native_options[name]} is not implemented: start several encode workers"
            )


def _load(arguments: Mapping[str, Any]) -> Any:
    """SGLang's encoder, loaded."""
    from sglang.srt.disaggregation.encoder.server import MMEncoder
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    server_args = ServerArgs(**arguments)
    logs.follow("sglang")
    publish(server_args, role="encoder")
    return MMEncoder(server_args, dist_init_method=f"tcp://{host_port(HOST, sglang_config.free_port(HOST))}")


def _is_lasting(error: Exception) -> bool:
    """Return whether this is an error of the device, after which a process can compute nothing more."""
    import torch

    lasting = getattr(torch, "AcceleratorError", None)
    return (lasting is not None and isinstance(error, lasting)) or "CUDA error" in str(error)
