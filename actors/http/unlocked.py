"""Bytes and text of megabytes, copied without the interpreter's lock: a thread makes them while the event loop runs.

Python copies with its lock held, and a copy of 27 MB takes 2 to 25 ms, most of it for pages that the system has yet to give. Here an
object is allocated first, which touches none of its pages, and filled by C's `memmove`, for which ctypes gives the lock up. Nothing
else has the object until it is whole.
"""

import ctypes
from typing import Any, Final

LARGE_BYTES: Final = 1024 * 1024
"""Smaller copies take well under a millisecond."""

_new_bytes: Final[Any] = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_new_text: Final[Any] = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_ssize_t, ctypes.c_uint32)(
    ("PyUnicode_New", ctypes.pythonapi)
)
_characters_of: Final[Any] = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyUnicode_AsUTF8AndSize", ctypes.pythonapi)
)
"""Where the characters of an ASCII text are; it makes no copy of these."""


def joined(parts: list[bytes]) -> bytes:
    """One object of all parts, at least `LARGE_BYTES` together. Each is given up as it is copied: `parts` is empty afterwards."""
    size = sum(map(len, parts))
    assert size >= LARGE_BYTES, "small objects are shared by the interpreter"
    made: bytes = _new_bytes(None, size)
    to = _address(made)
    parts.reverse()
    while parts:
        part = parts.pop()
        ctypes.memmove(to, part, len(part))
        to += len(part)
    return made


def ascii_text(data: bytes, begin: int, end: int) -> str:
    """The text of `data[begin:end]`, at least `LARGE_BYTES`, all of which the caller knows to be ASCII."""
    size = end - begin
    assert begin >= 0
    assert end <= len(data)
    assert size >= LARGE_BYTES, "small objects are shared by the interpreter"
    made: str = _new_text(size, 127)
    ctypes.memmove(_characters_of(made, None), _address(data) + begin, size)
    return made


def _address(data: bytes) -> int:
    found = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    assert found is not None
    return found
