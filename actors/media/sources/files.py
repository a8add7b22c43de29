"""Media in folders that the operator lists. No link below them is followed, so none leads out of them."""

import os
import stat
from pathlib import PurePosixPath
from typing import BinaryIO, Final
from urllib.parse import unquote, urlsplit

from headwater.actors.media.request.errors import MediaCode, MediaError
from headwater.actors.media.request.settings import FetchPolicy
from headwater.actors.media.sources.url import check_scheme
from headwater.actors.media.sources.web import CHUNK_BYTES, too_large

_STEP: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def copy_file(url: str, policy: FetchPolicy, bytes_max: int, out: BinaryIO) -> None:
    """Write the file at a file URL to `out`. Raises `MediaError`."""
    check_scheme("file", policy)
    path = _path_of(url)
    for folder in policy.directories:
        root = PurePosixPath(folder)
        if path.is_relative_to(root) and path != root:
            with _open_below(folder, path.relative_to(root)) as file:
                _copy(file, bytes_max, out)
            return
    raise MediaError(MediaCode.PATH, "The file is not in a folder that media may be read from.")


def _path_of(url: str) -> PurePosixPath:
    """The absolute path, without any `..`: a path is compared with folders as it is written."""
    parts = urlsplit(url)
    text = unquote(parts.path)
    bad = parts.netloc not in ("", "localhost") or parts.query or parts.fragment
    if bad or "\0" in text or "\\" in text or not text.startswith("/"):
        raise MediaError(MediaCode.BAD_URL, "Write URLs of files as file:///FOLDER/FILE.")
    path = PurePosixPath("/" + text.lstrip("/"))
    if ".." in path.parts:
        raise MediaError(MediaCode.PATH, "The path of a file must not contain `..`.")
    return path


def _open_below(folder: str, path: PurePosixPath) -> BinaryIO:
    """Open each folder on the way below the one before, so that nothing can be exchanged in between."""
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in path.parts[:-1]:
                below = os.open(name, _STEP | os.O_DIRECTORY, dir_fd=at)
                os.close(at)
                at = below
            # Not blocking: opening a pipe without a writer waits for one.
            descriptor = os.open(path.name, _STEP | os.O_NONBLOCK, dir_fd=at)
        finally:
            os.close(at)
    except OSError as error:
        raise MediaError(
            MediaCode.PATH, "The file does not exist, or cannot be read, or is a link."
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MediaError(MediaCode.PATH, "The path does not name a file.")
    return os.fdopen(descriptor, "rb")


def _copy(file: BinaryIO, bytes_max: int, out: BinaryIO) -> None:
    got = 0
    while chunk := file.read(CHUNK_BYTES):
        got += len(chunk)
        if got > bytes_max:
            raise too_large(bytes_max)
        out.write(chunk)
