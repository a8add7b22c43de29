"""Files to generate (images or a video): the request to a worker, its progress, and the files it made. Core NATS, never the log.

A worker accepts an `ImageRequest` or a `VideoRequest` at once. The edge then queries its state, which is answered when it
changed, fetches each file in pieces, and cancels the request once it has all of them: nothing larger than a piece is ever
one message, and a lost message is asked for again.
"""

from typing import Final, Literal

import msgspec

from headwater.schemas.messages.inference import Refused, WaitingEdge
from headwater.schemas.messages.media import PromptMedia

ImageFormat = Literal["png", "jpeg", "webp"]
FileNeed = Literal["image_generation", "image_edits", "video_generation"]
"""Capabilities that engines need for files: see `headwater.schemas.tables`."""

PIECE_BYTES: Final = 512 * 1024
"""Bytes of a file in one message. A NATS server accepts messages of 1 MiB by default."""

STATE_WAIT_S: Final = 2.0
"""A query whose answer has not changed is answered after this time."""

FINAL: Final = -1
"""Stands in place of the number of a preview, and means the file itself."""


class ImageRequest(msgspec.Struct, frozen=True, array_like=True, tag="generate"):
    """Images of one prompt: those with the numbers `first` to `count` - 1, each `width` × `height` pixels.

    Image number i begins with the noise of `seed` + i, so it is the same whichever worker generates it, and however
    many others are. `guidance` None: the model's default. `quality` (0 to 100) is that of jpeg and webp. Up to `previews`
    files show each image before it is finished. `waiter`: its images are for that edge alone; None: for any edge that asks for them.

    With `images` it is an edit: these are changed as the prompt says, at the size of the result. `mask` has one byte per pixel of the first
    one, shape (height, width, 1): what is not 0 is changed, and the rest stays. `strength` (0 to 1, None: the model's default) is how much of
    the image is given up for noise. They are fetched from `waiter`, so their data are empty in messages.
    """

    request: str
    prompt: str
    width: int
    height: int
    steps: int
    seed: int
    count: int = 1
    first: int = 0
    negative_prompt: str = ""
    guidance: float | None = None
    format: ImageFormat = "png"
    quality: int = 90
    previews: int = 0
    priority: int = 0
    waiter: WaitingEdge | None = None
    images: tuple[PromptMedia, ...] = ()
    mask: PromptMedia | None = None
    strength: float | None = None

    @property
    def need(self) -> FileNeed:
        """What its engine must be capable of."""
        return "image_edits" if self.images else "image_generation"

    @property
    def inputs(self) -> tuple[PromptMedia, ...]:
        """What a worker fetches for it."""
        return self.images if self.mask is None else (*self.images, self.mask)


class VideoRequest(msgspec.Struct, frozen=True, array_like=True, tag="video"):
    """A video of `frames` frames of `width` × `height` pixels, shown at `fps` frames per second, as an mp4 file.

    It begins with the noise of `seed`. `guidance` None: the model's default. It waits for no edge of its own: any edge fetches it.
    """

    request: str
    prompt: str
    width: int
    height: int
    frames: int
    fps: int
    steps: int
    seed: int
    negative_prompt: str = ""
    guidance: float | None = None
    priority: int = 0

    @property
    def count(self) -> int:
        """Files that are wanted, without previews."""
        return 1

    @property
    def first(self) -> int:
        """The first file that is wanted."""
        return 0

    @property
    def waiter(self) -> WaitingEdge | None:
        """No edge in particular: a job outlives its edge."""
        return None

    @property
    def need(self) -> FileNeed:
        """What its engine must be capable of."""
        return "video_generation"


FileRequest = ImageRequest | VideoRequest


class FileStateQuery(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """How far is it? Answered as soon as its `version` differs from `seen`, or after `STATE_WAIT_S`."""

    request: str
    seen: int = -1


class FilePieceQuery(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """`count` bytes of a file from `offset` on; `file` is its place in `FileState.files`."""

    request: str
    file: int
    offset: int
    count: int


FileQuery = FileStateQuery | FilePieceQuery


class GeneratedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of `size` bytes: number `number` of those wanted, or its `preview` with this number."""

    number: int
    size: int
    preview: int = FINAL


class FileState(msgspec.Struct, frozen=True, array_like=True):
    """How far a request is. `known` is false for one that the worker does not have (any more).

    `steps_done` counts the denoising steps of file number `number`. `files` only grows. The request has ended if
    `has_ended`: with all its files, or as `refused` says.
    """

    known: bool
    version: int = 0
    number: int = 0
    steps_done: int = 0
    files: tuple[GeneratedFile, ...] = ()
    has_ended: bool = False
    refused: Refused | None = None


class FilePiece(msgspec.Struct, frozen=True, array_like=True):
    """The bytes asked for; `known` is false for a file or a request that the worker does not have (any more)."""

    known: bool
    data: bytes = b""
