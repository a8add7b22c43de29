"""How a model takes media with SGLang: learned by letting SGLang's own processor expand some, and rehearsed with items of a request."""

from collections.abc import Awaitable, Callable, Mapping
from math import prod
from typing import Any, Final

import structlog

from headwater.engines.kv_events.sentinels import MediaSentinels
from headwater.engines.media.audio_rule import learn_audio_rule
from headwater.engines.media.image_rule import PROBES, black_image, fitting_rule, placeholder_of
from headwater.engines.media.video_rule import black_video, fitting_video_rule, probes
from headwater.engines.sglang.config.signatures import Signatures
from headwater.engines.sglang.media import SglangMedia, frames_of, processed, tokens_of
from headwater.schemas.media_kind import PromptMediaKind
from headwater.schemas.messages.media import VALUE_BYTES, PromptMedia
from headwater.schemas.tables.card import AudioSupport, ImageSupport, MediaSupport, VideoSupport
from headwater.schemas.tables.media_tokens import count_media_tokens

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

_log = structlog.get_logger("headwater.sglang")


async def learn_media(
    manager: Any, config: Mapping[str, Any], signatures: Signatures, sentinels: MediaSentinels
) -> SglangMedia | None:
    """How a started SGLang takes media. None for a model without. Kinds are left out whose prompts cannot be predicted exactly: requests with
    them are rejected, as a wrong count of tokens would name wrong blocks.

    `manager` is its tokenizer manager, `config` its resolved arguments.
    """
    processor = getattr(manager, "mm_processor", None)
    if processor is None or any(map(config.get, WITHOUT_ENCODER)):
        return None
    learner = _Learner(manager.model_config.hf_config, processor, config, signatures)
    found = MediaSupport(
        images=await learner.learn("image", learner.image_rule),
        videos=await learner.learn("video", learner.video_rule),
        audio=await learner.learn("audio", learner.audio_rule),
    )
    if not found.capabilities:
        return None
    media = SglangMedia(processor, found, sentinels, learner.image_prompts.get(PROBES[0], ()))
    for kind in found.placeholders:
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
            found = await rule(placeholder, limit)
        except (
            Exception
        ) as error:  # other models' processors fail in any way: such a model serves what remains
            return self._without(kind, f"{type(error).__name__}: {error}")
        return found if found is not None else self._without(kind, "its tokens follow no known rule")

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
        """How many placeholder tokens the model's processor makes of one for an item; -1 if it makes others in between."""
        tokens = processed(self._processor, kind, placeholder, [values])["input_ids"]
        return _count(tokens.flatten().tolist(), placeholder)

    async def rehearsed(self, media: SglangMedia, kind: PromptMediaKind) -> bool:
        """Let SGLang process two items as those of a request. False if it sees others."""
        try:
            await self._rehearse(media, kind)
        except Exception as error:  # as above
            self._without(kind, f"{type(error).__name__}: {error}")
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

    def _without(self, kind: PromptMediaKind, reason: str) -> None:
        _log.warning("media_not_served", kind=kind, model=self._name, reason=reason)


def _shapes(support: MediaSupport, kind: PromptMediaKind) -> list[tuple[int, ...]]:
    """Two items of a kind, of different numbers of tokens."""
    if kind == "image":
        return [(*size, 3) for size in PROBES[:2]]
    if kind == "video":
        return [(*size, 3) for size in probes(support.videos.frames if support.videos else 0)[-2:]]
    longest = support.audio.samples_max if support.audio else 0
    return [(longest // 2,), (longest,)]


def _count(tokens: list[int], placeholder: int) -> int:
    """How many placeholder tokens there are; -1 if there are others in between."""
    count = tokens.count(placeholder)
    start = tokens.index(placeholder) if count else 0
    return count if tokens[start : start + count] == [placeholder] * count else -1
