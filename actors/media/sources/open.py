"""Any source to a file in memory that decoders read."""

import os
from typing import BinaryIO

from headwater.actors.media.request.errors import MediaCode, MediaError
from headwater.actors.media.request.settings import FetchPolicy
from headwater.actors.media.request.task import DecodeTask
from headwater.actors.media.sources.files import copy_file
from headwater.actors.media.sources.inline import decode_inline
from headwater.actors.media.sources.url import check_scheme, scheme_of
from headwater.actors.media.sources.web import WebAccess, fetch_web


def open_source(
    task: DecodeTask, content: BinaryIO | None, policy: FetchPolicy, network: WebAccess, bytes_max: int
) -> BinaryIO:
    """The item's file, at its beginning: in memory, not on disk, and not in this process's heap. Raises `MediaError`."""
    out = os.fdopen(os.memfd_create("media", os.MFD_CLOEXEC), "w+b")
    try:
        if content is not None:
            decode_inline(task.encoding, content, policy, bytes_max, out)
        elif scheme_of(task.url) in ("https", "http"):
            fetch_web(task.url, policy, network, bytes_max, out)
        elif scheme_of(task.url) == "file":
            copy_file(task.url, policy, bytes_max, out)
        else:
            check_scheme(scheme_of(task.url), policy)
            raise MediaError(MediaCode.BAD_URL, "The URL of the media is invalid.")
        if not out.tell():
            raise MediaError(MediaCode.EMPTY, "The file of the media is empty.")
        out.seek(0)
    except BaseException:
        out.close()
        raise
    return out
