"""What a client names: media as a URL, as a data URL, as base64, or as the bytes of an upload."""

from typing import Literal, NamedTuple

from headwater.schemas.media_kind import SAMPLED_FRAMES

MediaKind = Literal["image", "audio", "video", "embedding", "file"]
Encoding = Literal["url", "data_url", "base64", "raw"]
TensorType = Literal["F32", "F16", "BF16"]
"""As safetensors spells them."""

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
