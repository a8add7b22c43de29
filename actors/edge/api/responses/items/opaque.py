"""`encrypted_content`: text that a client keeps and sends back, in a form that it need not understand.

It is encoded, not encrypted: it contains nothing but the client's own conversation, and any edge can read it without
a key or a stored state. What others wrote (another server's encrypted reasoning) is not readable here.
"""

import base64
import binascii
import zlib
from typing import Final

from headwater.actors.http.errors import bad_request

_PREFIX: Final = "hw1."
TEXT_BYTES_MAX: Final = 8 * 1024 * 1024
"""A small body could otherwise expand to gigabytes."""


def encode_opaque(text: str) -> str:
    """A text as `encrypted_content`."""
    packed = zlib.compress(text.encode("utf-8", "surrogatepass"))
    return _PREFIX + base64.urlsafe_b64encode(packed).decode()


def decode_opaque(content: str, param: str) -> str | None:
    """The text, None if it is not from Headwater. Raises `ApiError` 400 if it was damaged."""
    if not content.startswith(_PREFIX):
        return None
    try:
        packed = base64.urlsafe_b64decode(content[len(_PREFIX) :])
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, TEXT_BYTES_MAX)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError
        return data.decode("utf-8", "surrogatepass")
    except (binascii.Error, zlib.error, ValueError) as error:
        raise bad_request(f"{param} is damaged: send it as it was received.", param=param) from error
