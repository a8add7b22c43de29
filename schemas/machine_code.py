"""Numba's side of `jit`: machine code that is cached on disk. The first call of a kernel imports this module."""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numba
from numba.core import caching
from numba.extending import register_jitable

CACHE = Path(__file__).parent / "__pycache__" / f"numba-{numba.__version__}"
"""Machine code, one folder for each version of numba. If it is not writable, what is in it is still used, and else the user's cache folder;
where that is not writable either, each process compiles for itself.

numba discards a function's whole cache when another version of it wrote it. Environments that share this source tree, as those
of two engines do, would compile everything again each time the other had run: for 20 seconds, in any process.
"""


class _ReadableLocator(caching.UserProvidedCacheLocator):  # type: ignore[misc]  # numba has no types
    """A cache folder that can be read, though perhaps not written: one that was compiled into an image."""

    def ensure_cache_path(self) -> None:
        try:
            super().ensure_cache_path()
        except OSError:
            if not Path(self.get_cache_path()).is_dir():
                raise


class _OptionalImplementation(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_ReadableLocator, caching.UserWideCacheLocator)


class _OptionalCache(caching.FunctionCache):  # type: ignore[misc]
    """A cache whose loss costs a compilation: what cannot be read is made again, what cannot be written is done without."""

    _impl_class = _OptionalImplementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # unpickling a damaged file raises anything
            with suppress(OSError):
                # Else it would be found damaged by every process.
                self._cache_file.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)


def compiled(function: Callable[..., Any], parts: Container[Callable[..., Any]]) -> Any:
    """The function as numba's kernel, which runs without the GIL. `parts` are all functions that kernels may be compiled from."""
    dispatcher = numba.njit(nogil=True)(function)
    with _cache_of(function, parts), suppress(RuntimeError):
        # Numba's own `cache=True` fails where no folder can be written.
        dispatcher._cache = _OptionalCache(function)
    return dispatcher


def allow_in_kernels(function: Callable[..., Any]) -> None:
    """Let numba compile the function as a part of kernels."""
    register_jitable(function)


@contextmanager
def _cache_of(function: Callable[..., Any], parts: Container[Callable[..., Any]]) -> Iterator[None]:
    """Numba chooses a function's cache folder when it is decorated; other packages' kernels keep theirs.

    It notices changes of the kernel's own file only. So the folder's name has a digest of the other files that it is compiled from.
    """
    original = numba.config.CACHE_DIR
    folder = Path(original) if original else CACHE
    files = sorted({Path(part.__code__.co_filename) for part in _called(function, parts)})
    others = [file.read_bytes() for file in files if file != Path(function.__code__.co_filename)]
    if others:
        folder = folder / blake2b(b"".join(others), digest_size=8).hexdigest()
    numba.config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = original


def _called(function: Callable[..., Any], parts: Container[Callable[..., Any]]) -> set[Callable[..., Any]]:
    """Those of `parts` that a function calls, and those that they call."""
    reached: set[Callable[..., Any]] = set()
    unread = [function]
    while unread:
        caller = unread.pop()
        for name in caller.__code__.co_names:
            called = caller.__globals__.get(name)
            called = getattr(called, "py_func", called)
            if callable(called) and called in parts and called not in reached:
                reached.add(called)
                unread.append(called)
    return reached
