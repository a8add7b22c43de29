"""Validation of names that become subject tokens, stream names and keys."""

import re
from hashlib import blake2b

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_DIGEST_END = re.compile(r"-[0-9a-f]{8}\Z")
POOL_NAME_MAX = 56
"""Characters of a pool's name without its block size."""

REVISION_MAX = 96
"""Characters of the name of a worker's revision."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


PROBE = "__probe"
"""Writer of the empty messages that probe whether a log accepts any. No actor has a name that starts like this."""


class InvalidName(ValueError):
    """A name that cannot be a subject token."""


def token(kind: str, name: str) -> str:
    """Return `name` if it may be one subject token, else raise `InvalidName` naming `kind`.

    Subject tokens are 1 to 64 of letters, digits, '-' and '_': dots, wildcards and spaces would change
    which subjects a subscription matches.
    """
    if not _TOKEN.match(name):
        raise InvalidName(f"{kind} {name!r} is not a valid name: use 1 to 64 letters, digits, '-' or '_'")
    return name


def slug(text: str) -> str:
    """Turn any text (a model path, a host name) into a valid token, lower case."""
    return (_UNSAFE.sub("-", text).strip("-").lower() or "unnamed")[:64]


def pool_name(model: str, block_size: int) -> str:
    """The pool of workers whose KV blocks are interchangeable: one base model, one block size.

    A name that is a short lower-case token stays as it is; any other one gets a digest of the whole name, so that no two share a pool.
    """
    plain = slug(model)
    if plain != model or len(plain) > POOL_NAME_MAX or _DIGEST_END.search(plain):
        digest = blake2b(model.encode(errors="surrogatepass"), digest_size=4).hexdigest()
        plain = f"{plain[: POOL_NAME_MAX - 9].rstrip('-')}-{digest}"
    return f"{plain}-b{block_size}"
