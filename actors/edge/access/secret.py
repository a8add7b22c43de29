"""API keys as text: `hw-ID-SECRET`, 12 and 64 lower-case hex digits.

ID finds the record and may appear in logs. SECRET is 256 random bits, and only a digest of it is stored. The digest is
fast (BLAKE2b, with the id as its key) because guessing 256 random bits is out of reach at any speed; the slow hashes
that passwords need would cost milliseconds per request and protect nothing here. A fixed form lets scanners find keys
that were published by mistake: hw-[0-9a-f]{12}-[0-9a-f]{64}.
"""

import secrets
from hashlib import blake2b
from hmac import compare_digest
from typing import Final, NamedTuple

PREFIX: Final = "hw-"
ID_BYTES: Final = 6
SECRET_BYTES: Final = 32

_ID_END: Final = len(PREFIX) + 2 * ID_BYTES
_LENGTH: Final = _ID_END + 1 + 2 * SECRET_BYTES


class PresentedKey(NamedTuple):
    """A key as a client sent it: of the right form, its digits and its secret not yet verified."""

    id: str
    secret: bytes


def new_id() -> str:
    """An id for a new key."""
    return secrets.token_hex(ID_BYTES)


def new_secret() -> str:
    """A secret for a new key."""
    return secrets.token_hex(SECRET_BYTES)


def key_text(key_id: str, secret: str) -> str:
    """The key as its owner uses it."""
    return f"{PREFIX}{key_id}-{secret}"


def parse_key(text: bytes) -> PresentedKey | None:
    """The parts of a key; None if it is not of the form."""
    # Not a regular expression: that would take a third of an authentication.
    if len(text) != _LENGTH or not text.startswith(b"hw-") or text[_ID_END : _ID_END + 1] != b"-":
        return None
    return PresentedKey(text[len(PREFIX) : _ID_END].decode("latin-1"), text[_ID_END + 1 :])


def digest_of(key_id: str, secret: bytes) -> str:
    """What is stored of a secret, in hex."""
    return blake2b(secret, digest_size=32, key=key_id.encode(), person=b"headwater key").hexdigest()


def same_digest(first: str, second: str) -> bool:
    """Whether two digests are equal, in a time that does not depend on where they differ."""
    return compare_digest(first, second)
