"""Settings of images, audio and video in requests."""

from typing import Annotated, NamedTuple

from msgspec import Meta

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
from headwater.schemas.messages.media import MediaTransport


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


class MediaTransferSettings(NamedTuple):
    """How decoded media get from an edge to the workers of its requests: the same for both."""

    transport: Annotated[
        MediaTransport,
        Meta(
            description="how workers read decoded media of more than 1 MiB from edges: in pieces through NATS (none), over NIXL, or in shared memory "
            "(both on one machine). Where a reading fails, in pieces"
        ),
    ] = "none"
    mib: Annotated[
        int,
        Meta(
            ge=16,
            description="MiB of memory of an edge, and of a worker, for media on their way; larger items come in pieces",
        ),
    ] = 256
