"""Items of media to try an engine with."""

from typing import Final

from headwater.engines.media.image_rule import PROBES
from headwater.schemas.messages.media import VALUE_BYTES, PromptMedia
from headwater.schemas.tables.card import AudioSupport, ImageSupport, MediaSupport
from headwater.schemas.tables.media_tokens import count_audio_tokens, count_image_tokens

PROBE_ID: Final = "0" * 32
"""Of no real item: ids are hashes."""


def probe_item(support: MediaSupport) -> PromptMedia | None:
    """A black image, or for a model without images a second of silence; None for a model that takes neither."""
    if support.images is not None:
        return probe_image(support.images)
    return probe_clip(support.audio) if support.audio is not None else None


def probe_image(support: ImageSupport) -> PromptMedia:
    """A black image."""
    height, width = PROBES[0]
    tokens = count_image_tokens(support, height, width)
    return PromptMedia("image", PROBE_ID, 0, tokens, (height, width, 3), bytes(height * width * 3))


def probe_clip(support: AudioSupport) -> PromptMedia:
    """Silence of a second."""
    samples = min(support.rate_hz, support.samples_max)
    tokens = count_audio_tokens(support, samples)
    return PromptMedia("audio", PROBE_ID, 0, tokens, (samples,), bytes(samples * VALUE_BYTES["audio"]))
