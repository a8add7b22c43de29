"""Speech for SGLang: a Whisper model's recordings.

SGLang's own processor makes the prompt of Whisper's decoder from a language and a kind of timestamps, and has no earlier text, no translation and no model
for English only. So the prompt is the request's, as everywhere, and only the sound is processed, by the model's feature extractor.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from headwater.engines.engine import EngineUnavailable
from headwater.engines.media.speech import WHISPER, check_recording, samples_of, whisper_support
from headwater.engines.sglang.config.arguments import SglangSettings
from headwater.engines.sglang.embeddings.counter import ID_DIGITS
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.capability import Capability

PAGE_SIZE: Final = 1
"""SGLang 0.5.23 frees more of its cache than it took for a Whisper with larger pages, and then ends. Nothing of it is cached between requests."""

CHUNKS: Final = "chunked_prefill_size"
NO_CHUNKS: Final = -1
"""SGLang 0.5.23 ends where a batch is so full that only a part of a recording would fit into it."""

BATCH: Final = "max_prefill_tokens"
BATCH_TOKENS: Final = 8192
"""Five recordings in a batch. Without chunks SGLang reserves memory for as many tokens: 24 GiB for its own 16,384."""

KEPT: Final[frozenset[Capability]] = frozenset(
    {"logprobs", "logit_bias", "seed", "priority", "cache_salt", "pause", "profile"}
)
"""What a model that transcribes can do of what SGLang can."""


def is_whisper(folder: str) -> bool:
    """Whether a model's folder is that of a Whisper."""
    try:
        document = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        # SGLang reports what is wrong with files that it needs.
        return False
    return isinstance(document, dict) and document.get("model_type") == WHISPER


def speech_settings(settings: SglangSettings, given: Mapping[str, Any]) -> SglangSettings:
    """The settings that SGLang needs for a Whisper. Raises `EngineUnavailable` for others that would end it.

    `given` are the parsed native arguments. SGLang's context has the recording's places, too: the prompt's bound is the model's own.
    """
    if settings.block_size not in (0, PAGE_SIZE):
        raise EngineUnavailable(
            f"--block-size {settings.block_size}: SGLang loses count of its memory with a Whisper model unless it is {PAGE_SIZE}"
        )
    if int(given.get(CHUNKS) or NO_CHUNKS) != NO_CHUNKS:
        raise EngineUnavailable(
            f"--chunked-prefill-size {given[CHUNKS]}: SGLang ends where it cuts a recording into chunks; leave it out"
        )
    overrides = {**settings.overrides, CHUNKS: NO_CHUNKS}
    if BATCH not in given:
        overrides.setdefault(BATCH, BATCH_TOKENS)
    return settings._replace(block_size=PAGE_SIZE, max_model_len=0, overrides=overrides)


class SglangSpeech:
    """Takes recordings to a started SGLang. `manager` is its tokenizer manager, `context_max` what the operator allows (0: the model's).

    Raises `EngineUnavailable` for a release without a processor for such a model.
    """

    def __init__(self, manager: Any, context_max: int = 0) -> None:
        if getattr(manager, "mm_processor", None) is None:
            raise EngineUnavailable("this release of SGLang does not transcribe: install 0.5.23 or newer")
        config = manager.model_config.hf_config
        self.context_length = min(int(config.max_target_positions), context_max or 1 << 30)
        self._processor = manager.mm_processor
        self.support = whisper_support(
            self._processor._processor.feature_extractor,
            self._processor._tokenizer.get_vocab(),
            size=int(config.vocab_size),
            context=self.context_length,
        )
        self._threads = ThreadPoolExecutor(1, "recordings")
        self._processor.process_mm_data_async = _keep_prompt

    def capabilities(self, found: frozenset[Capability]) -> frozenset[Capability]:
        """What it can do, of what SGLang can. Languages are detected among allowed tokens."""
        return (found & KEPT) | {"transcription", "allowed_tokens"}

    def check(self, media: Sequence[PromptMedia]) -> None:
        """See `check_recording`."""
        check_recording(media, self.support)

    async def prepare(self, media: Sequence[PromptMedia]) -> dict[str, Any]:
        """The fields of SGLang's GenerateReqInput for a recording."""
        (item,) = media
        features = await asyncio.get_running_loop().run_in_executor(
            self._threads, partial(self._features, item)
        )
        return {"audio_data": [{"format": "recording", "features": features, "id": item.id}]}

    def close(self) -> None:
        """End its thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _features(self, item: PromptMedia) -> Any:
        extractor = self._processor._processor.feature_extractor
        found = extractor(
            samples_of(item),
            sampling_rate=self.support.rate_hz,
            padding="max_length",
            return_tensors="pt",
        )
        return found["input_features"][0]


async def _keep_prompt(*_: Any, request_obj: Any, **__: Any) -> Any:
    """In the place of `process_mm_data_async` of SGLang's processor: the request's own tokens, and the features that were made of its recording."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    (recording,) = request_obj.audio_data
    item = MultimodalDataItem(feature=recording["features"], modality=Modality.AUDIO)
    item.set_hash(int(recording["id"][:ID_DIGITS], 16))
    return MultimodalProcessorOutput(input_ids=list(request_obj.input_ids), mm_items=[item])
