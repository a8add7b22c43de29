"""The type of a file by its first bytes, and the types that decoders return. Names, headers and declared types are a client's claims."""

from typing import Final, NamedTuple, Protocol

from headwater.actors.media.request import MediaCode, MediaError, MediaKind

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
    found = format_of(head)
    accepted = ", ".join(one.name for one in FORMATS if kind in one.kinds)
    if found is None:
        raise MediaError(
            MediaCode.UNKNOWN_TYPE, f"The file is of no known type by its first bytes. Accepted: {accepted}."
        )
    if kind not in found.kinds:
        raise MediaError(
            MediaCode.WRONG_TYPE,
            f"The file is {found.name} by its first bytes; {kind} is accepted as {accepted}.",
        )
    return found


def _is_mp3_frame(head: bytes) -> bool:
    """Eleven bits of a frame's header, layer III, and neither of the bit rate and sample rate that do not exist."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return False
    return head[2] >> 4 != 15 and head[2] >> 2 & 3 != 3


# The result of decoders, and where they write the values.


class Sink(Protocol):
    """Takes the values of an item, in order."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Append them."""
        ...


class DecodedMedia(NamedTuple):
    """A decoded item whose values are in a `Sink`. See `request.Decoded` for the fields."""

    dtype: str
    shape: tuple[int, ...]
    format: str
    seconds: float = 0.0
    times_s: tuple[float, ...] = ()
    grid: tuple[int, ...] = ()
