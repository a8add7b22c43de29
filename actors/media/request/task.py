"""Messages between the intake and its processes. File descriptors travel with them: the content, and the decoded item."""

import fcntl
from typing import Final

import msgspec

from headwater.actors.media.request.errors import MediaCode
from headwater.actors.media.request.settings import FetchPolicy, MediaLimits
from headwater.actors.media.request.source import Encoding, MediaKind, MediaTarget

MESSAGE_BYTES_MAX: Final = 128 * 1024

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
"""On the memory of a decoded item: the process that decoded it can no longer change or cut it."""


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


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """A decoded item; a sealed file descriptor with its values travels with the message.

    `dtype` and `shape` are those of the array. `format` is the file's: `png`, `mp4`. `seconds` is the length of audio or
    video; `times_s` are those of sampled frames; `grid` is that of an embedding's patches (1, rows, columns).
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    format: str
    seconds: float = 0.0
    times_s: tuple[float, ...] = ()
    grid: tuple[int, ...] = ()


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """An item that was rejected. `final`: the process ends itself afterwards."""

    number: int
    code: MediaCode
    message: str
    final: bool = False


Reply = Decoded | Rejected
