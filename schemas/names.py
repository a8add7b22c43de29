"""Validation of names that become subject tokens, stream names and keys."""

import re

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
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
    """The pool of workers whose KV blocks are interchangeable: one base model, one block size."""
    return f"{slug(model)[:56].rstrip('-')}-b{block_size}"
