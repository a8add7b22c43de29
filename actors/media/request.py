"""Types of the media intake: sources, settings, tasks, the errors that end one, and what decoders return.

The type of a file is found by its first bytes: names, headers and declared types are a client's claims.
"""

import fcntl
from enum import StrEnum
from typing import Annotated, Final, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from headwater.schemas.media import SAMPLED_FRAMES

MediaKind = Literal["image", "audio", "video", "embedding", "file"]
Encoding = Literal["url", "data_url", "base64", "raw"]
TensorType = Literal["F32", "F16", "BF16"]
"""The names of the types in safetensors."""

GRID = "image_grid_thw"
"""The tensor of a model of Qwen2-VL's kind with an image's patches: 1, rows, columns."""

RATE_HZ = 16_000


class MediaSource(NamedTuple):
    """One item as a client gave it. `param` names its place in the request: `messages[0].content[1].image_url`.

    The fields are for the intake; callers use `from_url`, `from_base64` and `from_bytes`.
    """

    kind: MediaKind
    encoding: Encoding
    content: str | bytes | memoryview
    param: str | None = None

    @classmethod
    def from_url(cls, kind: MediaKind, url: str, param: str | None = None) -> "MediaSource":
        """Media at an https, http or file URL, or in a data URL. Nothing is checked yet."""
        is_data = url[:5].lower() == "data:"
        return cls(kind, "data_url" if is_data else "url", url, param)

    @classmethod
    def from_base64(cls, kind: MediaKind, text: str | bytes, param: str | None = None) -> "MediaSource":
        """Media in base64, as `input_audio` and Anthropic's images have them."""
        return cls(kind, "base64", text, param)

    @classmethod
    def from_bytes(cls, kind: MediaKind, data: bytes | memoryview, param: str | None = None) -> "MediaSource":
        """The bytes of an uploaded file."""
        return cls(kind, "raw", data, param)


class EmbeddingForm(NamedTuple):
    """What a model expects of a precomputed embedding: a tensor of shape (tokens, `width`), or (1, tokens, `width`).

    With `grid`, a tensor `image_grid_thw` besides: 1, and the rows and columns of the image's patches.
    """

    width: int
    dtypes: tuple[TensorType, ...] = ("F32", "F16", "BF16")
    grid: bool = False


class MediaTarget(NamedTuple):
    """What a model takes.

    `processor`: its processor's settings, in any stable notation; they become a part of the item's id. `rate_hz`: samples
    per second of audio. `frames`: how many frames are sampled from a video. `embedding`: None where the model takes none. `mask`: of an image its
    transparency alone, which says what of another image is to be changed.
    """

    processor: str = ""
    rate_hz: int = RATE_HZ
    frames: int = SAMPLED_FRAMES
    embedding: EmbeddingForm | None = None
    mask: bool = False


# Settings. Light to import: the command line reads them.

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
    """The sources that media may come from."""

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


# Errors: a code that clients can act on, and a message for people.


class MediaCode(StrEnum):
    """The reasons. Each is the `code` of an error response: 400, or 503 for `media_busy` and `media_unavailable`."""

    BAD_URL = "media_bad_url"
    SCHEME = "media_scheme_not_allowed"
    BAD_HOST = "media_bad_host"
    HOST = "media_host_not_allowed"
    PORT = "media_port_not_allowed"
    PRIVATE_ADDRESS = "media_private_address"
    DNS = "media_host_not_found"
    REDIRECTS = "media_too_many_redirects"
    DOWNGRADE = "media_redirect_downgrade"
    FETCH_FAILED = "media_fetch_failed"
    BAD_RESPONSE = "media_bad_response"
    LENGTH_MISMATCH = "media_length_mismatch"
    CONTENT_ENCODING = "media_content_encoding"
    FETCH_TIMEOUT = "media_fetch_timeout"
    PATH = "media_path_not_allowed"
    BAD_BASE64 = "media_bad_base64"
    EMPTY = "media_empty"
    TOO_LARGE = "media_too_large"
    UNKNOWN_TYPE = "media_unknown_type"
    WRONG_TYPE = "media_wrong_type"
    NOT_TAKEN = "media_not_taken"
    MALFORMED = "media_malformed"
    TOO_MANY_PIXELS = "media_too_many_pixels"
    TOO_LONG = "media_too_long"
    TOO_MANY_CHANNELS = "media_too_many_channels"
    CODEC = "media_codec_not_allowed"
    EMBEDDINGS_OFF = "media_embeddings_not_allowed"
    BAD_EMBEDDING = "media_bad_embedding"
    TOO_MANY_PAGES = "media_too_many_pages"
    TOO_MUCH_TEXT = "media_too_much_text"
    NO_TEXT = "media_no_text"
    ENCRYPTED = "media_encrypted"
    DECODE_TIMEOUT = "media_decode_timeout"
    OUT_OF_MEMORY = "media_out_of_memory"
    DECODER_FAILED = "media_decoder_failed"
    BUSY = "media_busy"
    UNAVAILABLE = "media_unavailable"


class MediaError(Exception):
    """An item that is rejected. The message says what is wrong and what to do; it never has an address or a query."""

    def __init__(self, code: MediaCode, message: str) -> None:
        super().__init__(message)
        self.code = code


# Messages between the intake and its processes. File descriptors travel with them.

MESSAGE_BYTES_MAX: Final = 128 * 1024

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
"""Seals on the memory of a decoded item: the process that decoded it can no longer change or shorten it."""


class ProcessSetup(msgspec.Struct, frozen=True):
    """First message to a process. `memory_bytes`: its maximum address space."""

    policy: FetchPolicy
    memory_bytes: int


class DecodeTask(msgspec.Struct, frozen=True):
    """One item to fetch and decode. `url` is empty where the content comes as a file descriptor."""

    number: int
    kind: MediaKind
    encoding: Encoding
    url: str
    limits: MediaLimits
    target: MediaTarget


class DecodedMedia(NamedTuple):
    """A decoded item whose values are in a `Sink`.

    `dtype` and `shape` are those of the array. `format` is the file's: `png`, `mp4`. `seconds` is the length of audio or
    video; `times_s` are those of sampled frames; `grid` is that of an embedding's patches (1, rows, columns).
    """

    dtype: str
    shape: tuple[int, ...]
    format: str
    seconds: float = 0.0
    times_s: tuple[float, ...] = ()
    grid: tuple[int, ...] = ()


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """The reply with a decoded item; a sealed file descriptor with its values travels with the message."""

    number: int
    media: DecodedMedia


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """An item that was rejected. `final`: the process ends itself afterwards."""

    number: int
    code: MediaCode
    message: str
    final: bool = False


Reply = Decoded | Rejected


HEAD_BYTES: Final = 64


class FileFormat(NamedTuple):
    """A format: its name, and the kinds of media that a file of it may be."""

    name: str
    kinds: tuple[MediaKind, ...]


PNG: Final = FileFormat("png", ("image", "file"))
JPEG: Final = FileFormat("jpeg", ("image", "file"))
WEBP: Final = FileFormat("webp", ("image", "file"))
GIF: Final = FileFormat("gif", ("image", "file"))
WAV: Final = FileFormat("wav", ("audio",))
FLAC: Final = FileFormat("flac", ("audio",))
OGG: Final = FileFormat("ogg", ("audio",))
MP3: Final = FileFormat("mp3", ("audio",))
MP4: Final = FileFormat("mp4", ("audio", "video"))
WEBM: Final = FileFormat("webm", ("audio", "video"))
SAFETENSORS: Final = FileFormat("safetensors", ("embedding",))
PDF: Final = FileFormat("pdf", ("file",))
TEXT: Final = FileFormat("text", ("file",))
"""UTF-8, which begins with anything."""

FORMATS: Final = (PNG, JPEG, WEBP, GIF, WAV, FLAC, OGG, MP3, MP4, WEBM, SAFETENSORS, PDF, TEXT)

IMAGE_FORMATS: Final = frozenset(one.name for one in FORMATS if "image" in one.kinds)


def format_of(head: bytes) -> FileFormat | None:
    """The format of a file that begins with these bytes, None if it is unknown."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return PNG
    if head.startswith(b"\xff\xd8\xff"):
        return JPEG
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return GIF
    if head.startswith(b"RIFF"):
        return {b"WEBP": WEBP, b"WAVE": WAV}.get(head[8:12])
    if head.startswith(b"fLaC"):
        return FLAC
    if head.startswith(b"OggS"):
        return OGG
    if head[4:8] == b"ftyp":
        return MP4
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return WEBM
    if head.startswith(b"%PDF-"):
        return PDF
    if head.startswith(b"ID3") or _is_mp3_frame(head):
        return MP3
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return SAFETENSORS
    return None


def check_format(head: bytes, kind: MediaKind) -> FileFormat:
    """The format of a file that must be of this kind. Raises `MediaError`."""
    file_format = format_of(head)
    accepted = ", ".join(candidate.name for candidate in FORMATS if kind in candidate.kinds)
    if file_format is None:
        raise MediaError(
            MediaCode.UNKNOWN_TYPE, f"The file is of no known type by its first bytes. Accepted: {accepted}."
        )
    if kind not in file_format.kinds:
        raise MediaError(
            MediaCode.WRONG_TYPE,
            f"The file is {file_format.name} by its first bytes; {kind} is accepted as {accepted}.",
        )
    return file_format


def _is_mp3_frame(head: bytes) -> bool:
    """Eleven bits of a frame's header, layer III, and neither of the bit rate and sample rate that do not exist."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return False
    return head[2] >> 4 != 15 and head[2] >> 2 & 3 != 3


# Where decoders write the values of an item.


class Sink(Protocol):
    """Takes the values of an item, in order."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Append them."""
        ...
