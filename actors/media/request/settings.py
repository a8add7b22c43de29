"""Settings of the media intake: types, defaults and descriptions only. Light to import: the command line reads them."""

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

Scheme = Literal["https", "data", "http", "file"]


class ImageLimits(NamedTuple):
    """Limits of one image."""

    bytes_max: Annotated[int, Meta(ge=1, description="maximum size of an image's file, in bytes")] = (
        32 * 1024 * 1024
    )
    fetch_s: Annotated[float, Meta(gt=0, description="seconds to fetch an image")] = 5.0
    decode_s: Annotated[int, Meta(ge=1, description="CPU seconds to check and decode an image")] = 10
    pixels_max: Annotated[
        int, Meta(ge=1, description="maximum pixels of an image, read from its header before it is decoded")
    ] = 40_000_000


class AudioLimits(NamedTuple):
    """Limits of one recording."""

    bytes_max: Annotated[int, Meta(ge=1, description="maximum size of an audio file, in bytes")] = (
        32 * 1024 * 1024
    )
    fetch_s: Annotated[float, Meta(gt=0, description="seconds to fetch an audio file")] = 10.0
    decode_s: Annotated[int, Meta(ge=1, description="CPU seconds to check and decode an audio file")] = 30
    seconds_max: Annotated[float, Meta(gt=0, description="maximum length of a recording, in seconds")] = (
        1800.0
    )
    channels_max: int = 8
    """Maximum channels of a recording."""


class VideoLimits(NamedTuple):
    """Limits of one video."""

    bytes_max: Annotated[int, Meta(ge=1, description="maximum size of a video's file, in bytes")] = (
        256 * 1024 * 1024
    )
    fetch_s: Annotated[float, Meta(gt=0, description="seconds to fetch a video")] = 30.0
    decode_s: Annotated[int, Meta(ge=1, description="CPU seconds to check and decode a video")] = 60
    seconds_max: Annotated[float, Meta(gt=0, description="maximum length of a video, in seconds")] = 600.0
    file_frames_max: int = 36_000
    """Maximum frames that the file of a video has."""
    pixels_max: int = 8_847_360
    """Maximum pixels of one frame of a video."""
    frames_max: Annotated[int, Meta(ge=1, description="maximum frames that are sampled from a video")] = 64
    sampled_pixels_max: int = 160_000_000
    """Maximum pixels of all frames sampled from a video together."""


class EmbeddingLimits(NamedTuple):
    """Limits of one item of precomputed embeddings."""

    bytes_max: int = 64 * 1024 * 1024
    """Maximum size of an embedding's file, in bytes."""
    fetch_s: Annotated[float, Meta(gt=0, description="seconds to fetch an embedding")] = 10.0
    decode_s: Annotated[int, Meta(ge=1, description="CPU seconds to check an embedding")] = 5
    tokens_max: int = 16_384
    """Maximum tokens that an embedding stands for: its rows."""


class FileLimits(NamedTuple):
    """Limits of one file that becomes text. One that is an image has those of images too."""

    bytes_max: Annotated[int, Meta(ge=1, description="maximum size of a file in a message, in bytes")] = (
        32 * 1024 * 1024
    )
    fetch_s: Annotated[float, Meta(gt=0, description="seconds to fetch a file of a message")] = 10.0
    decode_s: Annotated[int, Meta(ge=1, description="CPU seconds to check and read a file of a message")] = 20
    pages_max: Annotated[int, Meta(ge=1, description="maximum pages of a PDF")] = 500
    text_bytes_max: int = 4 * 1024 * 1024
    """Maximum text of a file of a message, in bytes of UTF-8."""


class MediaLimits(NamedTuple):
    """Limits of single items by kind. A model's own limits are these with fields replaced."""

    image: ImageLimits = ImageLimits()
    audio: AudioLimits = AudioLimits()
    video: VideoLimits = VideoLimits()
    embedding: EmbeddingLimits = EmbeddingLimits()
    file: FileLimits = FileLimits()


class FetchPolicy(NamedTuple):
    """Where media may come from."""

    schemes: Annotated[
        tuple[Scheme, ...],
        Meta(description="kinds of media URLs that are accepted, comma-separated: https, data, http, file"),
    ] = ("https", "data")
    hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="hosts that media are fetched from, comma-separated: `images.example`, or `*.example` for all "
            "names below it; holds for redirects too (default: every public host)"
        ),
    ] = ()
    ports: Annotated[
        tuple[int, ...],
        Meta(description="ports that media are fetched from, besides those of https and http"),
    ] = ()
    networks: Annotated[
        tuple[str, ...],
        Meta(description="non-public networks that media may be fetched from: 10.1.0.0/16"),
    ] = ()
    directories: Annotated[
        tuple[str, ...],
        Meta(description="folders whose files every client may name as file:///FOLDER/FILE"),
    ] = ()
    redirects_max: int = 3
    """Redirects that are followed, each checked like the first URL."""
    embeddings: Annotated[
        bool,
        Meta(
            description="accept precomputed embeddings (safetensors) from clients; only for clients you trust"
        ),
    ] = False


class IntakeSettings(NamedTuple):
    """The processes that fetch and decode."""

    processes: Annotated[
        int,
        Meta(
            ge=1, le=256, description="processes of an edge that fetch and decode media, started when needed"
        ),
    ] = 4
    queue_max: int = 256
    """Items of media that wait for a process, of those to be fetched and of those in requests; beyond it 503."""
    queue_s: float = 30.0
    """Seconds that an item of media waits for a process at most; then 503."""
    decoded_mib: Annotated[
        int,
        Meta(
            ge=64,
            description="decoded media that the requests of an edge hold at once, in MiB; beyond it 503",
        ),
    ] = 4096
    memory_mib: int = 1536
    """Maximum address space of such a process, in MiB; beyond it the item fails."""
