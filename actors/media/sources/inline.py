"""Media inside the request: data URLs (RFC 2397), base64 and plain bytes."""

import binascii
import re
from mmap import ACCESS_READ, mmap
from typing import BinaryIO, Final
from urllib.parse import unquote_to_bytes

from headwater.actors.media.request.errors import MediaCode, MediaError
from headwater.actors.media.request.settings import FetchPolicy
from headwater.actors.media.request.source import Encoding
from headwater.actors.media.sources.url import check_scheme
from headwater.actors.media.sources.web import too_large

HEAD_BYTES_MAX: Final = 1024
"""Of a data URL, up to its comma."""

_SPACE = re.compile(rb"[\t\n\f\r ]+")
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def encoded_bytes_max(encoding: Encoding, bytes_max: int) -> int:
    """How long the text of an item may be whose file has at most `bytes_max`: with line breaks, and percent-encoded."""
    if encoding == "raw":
        return bytes_max
    if encoding == "base64":
        return bytes_max * 4 // 3 * 80 // 76 + 64
    return bytes_max * 3 + HEAD_BYTES_MAX


def decode_inline(
    encoding: Encoding, content: BinaryIO, policy: FetchPolicy, bytes_max: int, out: BinaryIO
) -> None:
    """Write the bytes that `content` stands for to `out`. Raises `MediaError`."""
    if not content.seek(0, 2):
        return
    with mmap(content.fileno(), 0, access=ACCESS_READ) as whole, memoryview(whole) as text:
        data: bytes | memoryview
        if encoding == "raw":
            data = text
        elif encoding == "base64":
            data = decode_base64(text)
        else:
            check_scheme("data", policy)
            data = _decode_data_url(text)
        try:
            if len(data) > bytes_max:
                raise too_large(bytes_max)
            out.write(data)
        finally:
            if isinstance(data, memoryview):
                data.release()


def _decode_data_url(text: memoryview) -> bytes:
    """Its declared type is ignored: the first bytes of the data decide."""
    head, mark, _ = bytes(text[:HEAD_BYTES_MAX]).partition(b",")
    if not mark or head[:5].lower() != b"data:":
        raise MediaError(MediaCode.BAD_URL, "The data URL has no comma. Write data:image/png;base64,DATA.")
    body = text[len(head) + 1 :]
    try:
        if head.rpartition(b";")[2].strip().lower() == b"base64":
            return decode_base64(body)
        return unquote_to_bytes(bytes(body))
    finally:
        body.release()


def decode_base64(text: memoryview | bytes) -> bytes:
    """Forgiving as browsers are: white space, missing padding, percent-encoding, and the alphabet for URLs."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error:
        pass
    plain = bytes(text)
    if b"%" in plain:
        plain = unquote_to_bytes(plain)
    plain = _SPACE.sub(b"", plain).translate(_URL_SAFE).rstrip(b"=")
    try:
        return binascii.a2b_base64(plain + b"=" * (-len(plain) % 4), strict_mode=True)
    except binascii.Error as error:
        raise MediaError(MediaCode.BAD_BASE64, "The base64 of the media is invalid.") from error
