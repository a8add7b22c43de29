"""Settings of images, audio and video in requests."""

from typing import Annotated, NamedTuple

from headwater.actors.media.request.settings import (
    AudioLimits,
    EmbeddingLimits,
    FetchPolicy,
    FileLimits,
    ImageLimits,
    IntakeSettings,
    MediaLimits,
    VideoLimits,
)
from headwater.ops.config.setting import Prefix


class MediaSettings(NamedTuple):
    """Where media may come from, the processes that decode them, and the limits of single items."""

    fetch: Annotated[FetchPolicy, Prefix("media", inline=True)] = FetchPolicy()
    intake: Annotated[IntakeSettings, Prefix("media", inline=True)] = IntakeSettings()
    image: Annotated[ImageLimits, Prefix("media-image")] = ImageLimits()
    audio: Annotated[AudioLimits, Prefix("media-audio")] = AudioLimits()
    video: Annotated[VideoLimits, Prefix("media-video")] = VideoLimits()
    embedding: Annotated[EmbeddingLimits, Prefix("media-embedding")] = EmbeddingLimits()
    file: Annotated[FileLimits, Prefix("media-file")] = FileLimits()

    @property
    def limits(self) -> MediaLimits:
        """The limits of single items by kind."""
        return MediaLimits(self.image, self.audio, self.video, self.embedding, self.file)
