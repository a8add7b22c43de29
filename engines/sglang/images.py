"""Images for SGLang: how a model takes them, learned by letting SGLang's own processor expand some, and a request's images as it wants them.

SGLang decodes a prompt of token ids to text and encodes it again for images that it is to process itself: it may get other tokens, and takes text
that spells the placeholder for one. So images are processed here, by the model's image processor, and SGLang gets the result with the prompt's own tokens.

SGLang replaces an image's tokens by numbers made from a hash, by which its cache distinguishes images. The hash is 64 bits of our id; SGLang itself
sets it too late for images that are processed already, so it is set on what its processor returns.
"""

import asyncio
import copy
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import structlog
from msgspec.structs import replace

from headwater.engines.kv_events.sentinels import ImageSentinels
from headwater.engines.media.image_rule import PROBES, black_image, fitting_rule, placeholder_of, probe_image
from headwater.engines.media.prompt import check_media, image_of
from headwater.engines.sglang.config.signatures import Signatures
from headwater.engines.sglang.embeddings.counter import ID_DIGITS
from headwater.engines.sglang.embeddings.input import GivenEmbedding, request_data, separate
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.card import ImageSupport, MediaSupport

PER_PROMPT: Final = 999
"""Images of a prompt, where SGLang has no limit; as vLLM's default."""

THREADS: Final = 2
"""That process images. PyTorch computes outside of the interpreter's lock."""

WITHOUT_ENCODER: Final = ("language_only", "language_model_only", "encoder_only")
"""Arguments of SGLang with which it computes no images, or nothing else."""

TOO_OLD: Final = (
    "before 0.5.23 SGLang distinguishes images by 30 bits of a hash, so that one could be taken for another"
)

_log = structlog.get_logger("headwater.sglang")


class SglangImages:
    """Takes images to a started SGLang. `sentinels` learn every image, for its KV events."""

    def __init__(
        self, processor: Any, support: ImageSupport, sentinels: ImageSentinels, probe_prompt: Sequence[int]
    ) -> None:
        """`processor` is the one of SGLang's tokenizer manager, `probe_prompt` what it makes of the probe image."""
        self.support = support
        self.probe_prompt = tuple(probe_prompt)
        self._processor = processor
        self._sentinels = sentinels
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(THREADS, "images", initializer=self._copy_processor)
        _check_and_name_items(processor)

    def check(self, tokens: Sequence[int], media: Sequence[PromptMedia]) -> None:
        """See `check_media`."""
        check_media(tokens, media, MediaSupport(images=self.support))

    def probe_image(self) -> PromptMedia:
        """The image of `probe_prompt`."""
        probe = probe_image(self.support)
        return replace(probe, start=self.probe_prompt.index(self.support.placeholder))

    async def prepare(
        self, media: Sequence[PromptMedia], given: Sequence[GivenEmbedding] | None = None
    ) -> dict[str, Any]:
        """The fields of SGLang's GenerateReqInput for these images, with the embeddings that are given in the place of all pixels.

        Raises `RequestRejected`.
        """
        if given is None:
            make = partial(self._process, [image_of(item) for item in media])
        else:
            make = partial(request_data, given)
        processed = await asyncio.get_running_loop().run_in_executor(self._threads, make)
        for item in media:
            self._sentinels.learn(item.id, item.tokens, _numbers(item.id))
        return {"image_data": [processed], "mm_hashes": [item.id[:ID_DIGITS] for item in media]}

    def close(self) -> None:
        """End its threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _copy_processor(self) -> None:
        # One for each thread, as SGLang does: they keep what they computed last.
        self._own.processor = copy.deepcopy(self._processor._processor.image_processor)

    def _process(self, images: list[Any]) -> dict[str, Any]:
        own = self._processor.image_config or {}
        found = self._own.processor(images=images, return_tensors="pt", **own)
        return {"format": "processor_output", **found}


async def learn_images(
    manager: Any, config: Mapping[str, Any], signatures: Signatures, sentinels: ImageSentinels
) -> SglangImages | None:
    """How a started SGLang takes images. None for a model without, and for one whose prompts cannot be predicted exactly: its requests
    with images are rejected, as a wrong count of tokens would name wrong blocks.

    `manager` is its tokenizer manager, `config` its resolved arguments.
    """
    processor = getattr(manager, "mm_processor", None)
    placeholder = placeholder_of(manager.model_config.hf_config)
    limit = int((config.get("limit_mm_data_per_request") or {}).get("image", PER_PROMPT))
    if processor is None or placeholder is None or not limit or any(map(config.get, WITHOUT_ENCODER)):
        return None
    model = config["model_path"]
    if not signatures.has("MultimodalDataItem", "pad_values"):
        _log.warning("media_not_served", kind="image", model=model, reason=TOO_OLD)
        return None
    try:
        prompts = {size: await _expand(processor, size) for size in PROBES}
        support = fitting_rule(
            manager.model_config.hf_config,
            processor._processor.image_processor,
            placeholder=placeholder,
            limit=limit,
            found={size: _count(tokens, placeholder) for size, tokens in prompts.items()},
        )
        if support is None:
            _log.warning(
                "media_not_served", kind="image", model=model, reason="its image tokens follow no known rule"
            )
            return None
        images = SglangImages(processor, support, sentinels, prompts[PROBES[0]])
        await _rehearse(images, processor, prompts)
    except Exception as error:  # other models' processors fail in any way: such a model serves text
        _log.warning("media_not_served", kind="image", model=model, reason=f"{type(error).__name__}: {error}")
        return None
    return images


async def _expand(processor: Any, size: tuple[int, int]) -> list[int]:
    """The tokens that SGLang makes of an image alone."""
    image = black_image(*size)
    return await _tokens_of(processor, processor.mm_tokens.image_token, image_data=[image])


def _count(tokens: list[int], placeholder: int) -> int:
    """How many placeholder tokens there are; -1 if there are others in between."""
    count = tokens.count(placeholder)
    start = tokens.index(placeholder) if count else 0
    return count if tokens[start : start + count] == [placeholder] * count else -1


async def _rehearse(
    images: SglangImages, processor: Any, prompts: Mapping[tuple[int, int], list[int]]
) -> None:
    """Let SGLang process two images as those of a request. Raises if it sees others."""
    tokens: list[int] = []
    media: list[PromptMedia] = []
    for number, (height, width) in enumerate(PROBES[:2]):
        found = prompts[height, width]
        start = len(tokens) + found.index(images.support.placeholder)
        count, shape = found.count(images.support.placeholder), (height, width, 3)
        media.append(PromptMedia("image", f"{number:032x}", start, count, shape, bytes(height * width * 3)))
        tokens += found
    images.check(tokens, media)
    await _tokens_of(processor, tokens, input_ids=tokens, **await images.prepare(media))


async def _tokens_of(processor: Any, prompt: str | list[int], **fields: Any) -> list[int]:
    """What SGLang's processor makes of a prompt with images, called as its tokenizer manager calls it."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(**fields)
    output = await processor.process_mm_data_async(
        image_data=request.image_data,
        audio_data=None,
        input_text=prompt,
        request_obj=request,
        max_req_input_len=None,
    )
    return list(output.input_ids)


def _check_and_name_items(processor: Any) -> None:
    """Make `processor` check that it sees the images that a request has, and name them by the request's hashes."""
    process = processor.process_mm_data_async

    async def process_and_name(*arguments: Any, request_obj: Any, **named: Any) -> Any:
        output = await process(*arguments, request_obj=request_obj, **named)
        hashes = request_obj.mm_hashes
        if not hashes:
            return output
        items, tokens = list(separate(output.mm_items)), list(output.input_ids)
        if (
            tokens != request_obj.input_ids
            or len(items) != len(hashes)
            or any(len(item.offsets) != 1 for item in items)
        ):
            raise ValueError("it sees other images in the prompt than there are")
        for item, digits in zip(items, hashes, strict=True):
            item.set_hash(int(digits, 16))
        output.mm_items = items
        # Made before, of other hashes.
        output.padded_input_ids = output.build_padded_input_ids(tokens, items)
        return output

    processor.process_mm_data_async = process_and_name


def _numbers(id_: str) -> tuple[int, ...]:
    """What SGLang puts in the place of an image's tokens, over and over."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    item = MultimodalDataItem(modality=Modality.IMAGE)
    item.set_hash(int(id_[:ID_DIGITS], 16))
    found: tuple[int, ...] = tuple(item.padding_values())
    return found
