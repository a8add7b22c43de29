"""Images, videos and audio for SGLang: the form in which it takes them, and the ids by which its cache distinguishes them.

SGLang decodes a prompt of token ids to text and encodes it again for media that it is to process itself: it may get other tokens, and takes text
that spells a placeholder for one. So media are processed here, by the model's own processor, and SGLang gets the result with the prompt's own tokens.

SGLang replaces the tokens of an item by numbers made from a hash, by which its cache distinguishes items. The hash is 64 bits of
our id; SGLang itself sets it too late for items that are processed already, so it is set on what its processor returns.
"""

import asyncio
import copy
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from typing import Any, Final

from msgspec.structs import replace

from headwater.engines.kv_events import MediaSentinels
from headwater.engines.media import (
    PROBES,
    black_image,
    black_video,
    check_media,
    fitting_rule,
    fitting_video_rule,
    image_of,
    learn_audio_rule,
    log_not_served,
    placeholder_of,
    probe_image,
    probes,
    values_of,
)
from headwater.engines.sglang.embedding_input import FEATURE, GivenEmbedding, request_data, separate
from headwater.engines.sglang.process import ID_DIGITS
from headwater.engines.sglang.signatures import Signatures
from headwater.schemas.media import SAMPLED_FRAMES, VALUE_BYTES, PromptMedia, PromptMediaKind
from headwater.schemas.tables import (
    AudioSupport,
    ImageSupport,
    MediaSupport,
    VideoSupport,
    count_media_tokens,
)

THREADS: Final = 2
"""Threads that process media. PyTorch computes outside of the interpreter's lock."""

FIELDS: Final[dict[PromptMediaKind, str]] = {
    "image": "image_data",
    "video": "video_data",
    "audio": "audio_data",
}
"""The fields of SGLang's GenerateReqInput, in the order in which its processor returns the items."""

ARGUMENTS: Final[dict[PromptMediaKind, str]] = {"video": "videos", "audio": "audios"}
"""Arguments of the function with which SGLang's processor calls the model's own."""

SAMPLING: Final = ("fps", "nframes", "min_frames", "max_frames")
"""Settings by which SGLang takes frames from a video. Our videos already have the frames they should have."""

LENGTHS: Final = "audio_feature_lens"


def frames_of(settings: Mapping[str, Any]) -> int:
    """Return how many frames a video is sampled to, by the settings of videos in `--mm-process-config`."""
    return int(settings.get("nframes") or settings.get("max_frames") or SAMPLED_FRAMES)


def without_sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a kind of media that do not choose a video's frames."""
    return {name: value for name, value in settings.items() if name not in SAMPLING}


def media_settings(config: Mapping[str, Any]) -> str:
    """The `--mm-process-config` of SGLang as JSON, "" without: all of it that does not choose a video's frames.

    `config` are its resolved arguments.
    """
    process_config = config.get("mm_process_config") or {}
    processor_settings = {kind: without_sampling(settings) for kind, settings in process_config.items()}
    used = {kind: settings for kind, settings in processor_settings.items() if settings}
    return json.dumps(used, sort_keys=True, default=str) if used else ""


class SglangMedia:
    """Takes media to a started SGLang. `sentinels` learn every item, for its KV events."""

    def __init__(
        self,
        processor: Any,
        support: MediaSupport,
        sentinels: MediaSentinels,
        probe_prompt: Sequence[int] = (),
    ) -> None:
        """`processor` is the one of SGLang's tokenizer manager, `probe_prompt` what it makes of the image that `probe_image` makes."""
        self.support = support
        self.probe_prompt = tuple(probe_prompt)
        self._processor = processor
        self._sentinels = sentinels
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(THREADS, "media", initializer=self._copy_processor)
        _check_and_name_items(processor)

    def check(self, tokens: Sequence[int], media: Sequence[PromptMedia]) -> None:
        """See `check_media`."""
        check_media(tokens, media, self.support)

    def probe_image(self) -> PromptMedia:
        """The image of `probe_prompt`."""
        images = self.support.images
        assert images is not None, "only models that take images are probed"
        return replace(probe_image(images), start=self.probe_prompt.index(images.placeholder))

    async def prepare(
        self, media: Sequence[PromptMedia], given_embeddings: Sequence[GivenEmbedding] | None = None
    ) -> dict[str, Any]:
        """The fields of SGLang's GenerateReqInput for these items, with the embeddings that are given in the place of the pixels of all.

        Raises `RequestRejected`.
        """
        kinds = {kind: [item for item in media if item.kind == kind] for kind in FIELDS}
        embeddings = (
            {}
            if given_embeddings is None
            else {
                kind: [
                    embedding
                    for item, embedding in zip(media, given_embeddings, strict=True)
                    if item.kind == kind
                ]
                for kind in FIELDS
            }
        )
        make = partial(self._fields, kinds, embeddings)
        fields = await asyncio.get_running_loop().run_in_executor(self._threads, make)
        for item in media:
            placeholder = self.support.placeholders[item.kind]
            self._sentinels.learn(item.id, item.tokens, _numbers(item.id), placeholder)
        names = [item.id[:ID_DIGITS] for items in kinds.values() for item in items]
        return {**fields, "mm_hashes": names}

    def close(self) -> None:
        """End its threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _copy_processor(self) -> None:
        # One for each thread, as SGLang does: they keep what they computed last.
        self._own.processor = copy.deepcopy(self._processor._processor)

    def _fields(
        self,
        kinds: Mapping[PromptMediaKind, Sequence[PromptMedia]],
        embeddings: Mapping[PromptMediaKind, Sequence[GivenEmbedding]],
    ) -> dict[str, Any]:
        """A list with one entry for each kind that there is: SGLang takes all processed items of a kind together."""
        return {
            FIELDS[kind]: [
                request_data(kind, embeddings[kind]) if embeddings else self._processed(kind, items)
            ]
            for kind, items in kinds.items()
            if items
        }

    def _processed(self, kind: PromptMediaKind, items: Sequence[PromptMedia]) -> dict[str, Any]:
        own_processor = self._own.processor
        if kind == "image":
            settings = self._processor.image_config or {}
            images = [image_of(item) for item in items]
            fields = own_processor.image_processor(images=images, return_tensors="pt", **settings)
        else:
            values = [values_of(item) for item in items]
            fields = processed(self._processor, kind, self.support.placeholders[kind], values, own_processor)
        return {"format": "processor_output", **fields}


def processed(
    processor: Any, kind: PromptMediaKind, placeholder: int, values: Sequence[Any], own_processor: Any = None
) -> dict[str, Any]:
    """Return what SGLang's processor makes of videos or audio, in arrays as `PromptMedia` has them, next to a prompt of one placeholder for each.

    `own_processor` is a copy of the model's processor. The prompt's tokens are `input_ids`, with as many of an item as the model makes of it.
    """
    text = processor._tokenizer.convert_ids_to_tokens(placeholder) * len(values)
    settings: dict[str, Any] = {}
    if kind == "video":
        settings["processor_video_config"] = without_sampling(processor.video_config or {})
    else:
        features = processor._processor.feature_extractor
        settings["audio_kwargs"] = {"sampling_rate": features.sampling_rate}
    outputs = processor.process_mm_data(
        text, processor=own_processor, **{ARGUMENTS[kind]: list(values)}, **settings
    )
    return dict(outputs)


async def tokens_of(processor: Any, prompt: str | list[int], **fields: Any) -> list[int]:
    """Return what SGLang's processor makes of a prompt with media, called as its tokenizer manager calls it."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(**fields)
    output = await processor.process_mm_data_async(
        image_data=request.image_data,
        audio_data=request.audio_data,
        input_text=prompt,
        request_obj=request,
        max_req_input_len=None,
    )
    return list(output.input_ids)


def _check_and_name_items(processor: Any) -> None:
    """Make `processor` check that it sees the media that a request has, and name them by the request's hashes."""
    process = processor.process_mm_data_async

    async def process_and_name(*arguments: Any, request_obj: Any, **named: Any) -> Any:
        # Absent from requests to pool that have none.
        hashes = getattr(request_obj, "mm_hashes", None)
        if hashes and request_obj.audio_data and not (request_obj.image_data or request_obj.video_data):
            named["input_text"] = _with_own_tokens(processor, request_obj)
        output = await process(*arguments, request_obj=request_obj, **named)
        if not hashes:
            return output
        items = [single for item in output.mm_items for single in single_items(item)]
        tokens = list(output.input_ids)
        if (
            tokens != request_obj.input_ids
            or len(items) != len(hashes)
            or any(len(item.offsets) != 1 for item in items)
        ):
            raise ValueError("it sees other media in the prompt than there are")
        share_lengths(items)
        for item, digits in zip(items, hashes, strict=True):
            item.set_hash(int(digits, 16))
        output.mm_items = items
        # Made before, of other hashes.
        output.padded_input_ids = output.build_padded_input_ids(tokens, items)
        return output

    processor.process_mm_data_async = process_and_name


def _with_own_tokens(processor: Any, request: Any) -> str:
    """A text with one clip for a request with audio, whose tokens are in the clips' data: Qwen2-Audio's processor decodes all prompts to text."""
    [data] = request.audio_data
    data["input_ids"] = request.input_ids
    text: str = processor.mm_tokens.audio_token
    return text


def single_items(item: Any) -> Iterator[Any]:
    """SGLang's items of a request, one for each of ours: it bundles videos, and what has embeddings."""
    if getattr(item, FEATURE, None) is not None:
        yield from separate(item)
        return
    grids = item.model_specific_data.get("video_grid_thw")
    if grids is None or len(item.offsets) == 1 or len(grids) != len(item.offsets):
        yield item
        return
    row = 0
    for place, offset in enumerate(item.offsets):
        single = copy.copy(item)
        rows = int(grids[place].prod())
        single.offsets = [offset]
        single.feature = item.feature[row : row + rows]
        single.model_specific_data = {
            name: value[place : place + 1] for name, value in item.model_specific_data.items()
        }
        row += rows
        yield single


def share_lengths(items: Sequence[Any]) -> None:
    """Give each clip its length: SGLang leaves those of all of a request with the first, and its scheduler ends on one without. Raises ValueError."""
    clips = [item for item in items if item.is_audio()]
    lengths = clips[0].model_specific_data.get(LENGTHS) if clips else None
    if lengths is None or len(clips) == 1:
        return
    if len(lengths) != len(clips):
        raise ValueError(f"it has {len(lengths)} lengths of {len(clips)} audio clips")
    for place, clip in enumerate(clips):
        clip.model_specific_data = clip.model_specific_data | {LENGTHS: lengths[place : place + 1]}


def _numbers(id_: str) -> tuple[int, ...]:
    """Return what SGLang puts in the place of an item's tokens, over and over."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    item = MultimodalDataItem(modality=Modality.IMAGE)
    item.set_hash(int(id_[:ID_DIGITS], 16))
    padding_values: tuple[int, ...] = tuple(item.padding_values())
    return padding_values


# How a model takes media: learned from SGLang's own processor, and rehearsed with a request's items.

PER_PROMPT: Final = 999
"""Items of a prompt, where SGLang has no limit; as vLLM's default."""

WITHOUT_ENCODER: Final = ("language_only", "language_model_only", "encoder_only")
"""Arguments of SGLang with which it computes no media, or nothing else."""

TOO_OLD: Final = (
    "before 0.5.23 SGLang distinguishes media by 30 bits of a hash, so that one could be taken for another"
)

SUPPORT_FIELDS: Final[dict[PromptMediaKind, str]] = {"image": "images", "video": "videos", "audio": "audio"}

Support = ImageSupport | VideoSupport | AudioSupport
Learn = Callable[[int, int], Awaitable[Support | None]]
"""The rule of a kind, None if none fits: of the placeholder's id and the limit per prompt."""


async def learn_media(
    manager: Any, config: Mapping[str, Any], signatures: Signatures, sentinels: MediaSentinels
) -> SglangMedia | None:
    """Return how a started SGLang takes media. None for a model without. Kinds are left out whose prompts cannot be predicted exactly: requests with
    them are rejected, as a wrong count of tokens would name wrong blocks.

    `manager` is its tokenizer manager, `config` its resolved arguments.
    """
    processor = getattr(manager, "mm_processor", None)
    if processor is None or any(map(config.get, WITHOUT_ENCODER)):
        return None
    learner = _Learner(manager.model_config.hf_config, processor, config, signatures)
    support = MediaSupport(
        images=await learner.learn("image", learner.image_rule),
        videos=await learner.learn("video", learner.video_rule),
        audio=await learner.learn("audio", learner.audio_rule),
    )
    if not support.capabilities:
        return None
    media = SglangMedia(processor, support, sentinels, learner.image_prompts.get(PROBES[0], ()))
    for kind in support.placeholders:
        if not await learner.rehearsed(media, kind):
            media.support = media.support._replace(**{SUPPORT_FIELDS[kind]: None})
    if not media.support.capabilities:
        media.close()
        return None
    return media


class _Learner:
    """What is learned of one model, kind by kind."""

    def __init__(self, model: Any, processor: Any, config: Mapping[str, Any], signatures: Signatures) -> None:
        self._model = model
        self._processor = processor
        self._limits = config.get("limit_mm_data_per_request") or {}
        self._name = config["model_path"]
        self._exact = signatures.has("MultimodalDataItem", "pad_values")
        self.image_prompts: dict[tuple[int, int], list[int]] = {}
        """What SGLang makes of the probes."""

    async def learn(self, kind: PromptMediaKind, rule: Learn) -> Any:
        """The rule of a kind, None without."""
        placeholder = placeholder_of(self._model, kind)
        limit = int(self._limits.get(kind, PER_PROMPT))
        if placeholder is None or not limit:
            return None
        if not self._exact:
            return self._without(kind, TOO_OLD)
        try:
            learned = await rule(placeholder, limit)
        except (
            Exception
        ) as error:  # other models' processors fail in any way: such a model serves what remains
            return self._without(kind, error)
        return learned if learned is not None else self._without(kind, "its tokens follow no known rule")

    async def image_rule(self, placeholder: int, limit: int) -> ImageSupport | None:
        """The rule of images' tokens."""
        text = self._processor.mm_tokens.image_token
        for size in PROBES:
            images = [black_image(*size)]
            self.image_prompts[size] = await tokens_of(self._processor, text, image_data=images)
        return fitting_rule(
            self._model,
            self._processor._processor.image_processor,
            placeholder=placeholder,
            limit=limit,
            found={size: _count(tokens, placeholder) for size, tokens in self.image_prompts.items()},
        )

    async def video_rule(self, placeholder: int, limit: int) -> VideoSupport | None:
        """The rule of videos' tokens."""
        frames = frames_of(self._processor.video_config or {})
        return fitting_video_rule(
            self._model,
            self._processor._processor.video_processor,
            placeholder=placeholder,
            limit=limit,
            frames=frames,
            found={size: self._expanded("video", placeholder, black_video(size)) for size in probes(frames)},
        )

    async def audio_rule(self, placeholder: int, limit: int) -> AudioSupport | None:
        """The rule of audio's tokens."""
        return learn_audio_rule(
            self._processor._processor.feature_extractor,
            lambda silence: self._expanded("audio", placeholder, silence),
            placeholder=placeholder,
            limit=limit,
        )

    def _expanded(self, kind: PromptMediaKind, placeholder: int, values: Any) -> int:
        """Return how many placeholder tokens the model's processor makes of one for an item; -1 if it makes others in between."""
        tokens = processed(self._processor, kind, placeholder, [values])["input_ids"]
        return _count(tokens.flatten().tolist(), placeholder)

    async def rehearsed(self, media: SglangMedia, kind: PromptMediaKind) -> bool:
        """Let SGLang process two items as those of a request. False if it sees others."""
        try:
            await self._rehearse(media, kind)
        except Exception as error:  # as above
            self._without(kind, error)
            return False
        return True

    async def _rehearse(self, media: SglangMedia, kind: PromptMediaKind) -> None:
        support = media.support
        tokens: list[int] = []
        items: list[PromptMedia] = []
        for number, shape in enumerate(_shapes(support, kind)[: support.limits[kind]]):
            count = count_media_tokens(support, kind, shape)
            prompt = self._prompt_of(kind, support.placeholders[kind], count, shape)
            start = len(tokens) + prompt.index(support.placeholders[kind])
            data = bytes(prod(shape) * VALUE_BYTES[kind])
            items.append(PromptMedia(kind, f"{number:032x}", start, count, shape, data))
            tokens += prompt
        media.check(tokens, items)
        await tokens_of(self._processor, tokens, input_ids=tokens, **await media.prepare(items))

    def _prompt_of(
        self, kind: PromptMediaKind, placeholder: int, count: int, shape: tuple[int, ...]
    ) -> list[int]:
        if kind == "image":
            return self.image_prompts[shape[0], shape[1]]
        begin, end = (
            int(getattr(self._model, f"vision_{side}_token_id", 0) or 0) for side in ("start", "end")
        )
        return [begin, *[placeholder] * count, end]

    def _without(self, kind: PromptMediaKind, reason: str | Exception) -> None:
        log_not_served(kind, self._name, reason)


def _shapes(support: MediaSupport, kind: PromptMediaKind) -> list[tuple[int, ...]]:
    """Two items of a kind, of different numbers of tokens."""
    if kind == "image":
        return [(*size, 3) for size in PROBES[:2]]
    if kind == "video":
        return [(*size, 3) for size in probes(support.videos.frames if support.videos else 0)[-2:]]
    longest = support.audio.samples_max if support.audio else 0
    return [(longest // 2,), (longest,)]


def _count(tokens: list[int], placeholder: int) -> int:
    """Return how many placeholder tokens there are; -1 if there are others in between."""
    count = tokens.count(placeholder)
    start = tokens.index(placeholder) if count else 0
    return count if tokens[start : start + count] == [placeholder] * count else -1
