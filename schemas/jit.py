"""Compilation of hot loops: numba, with types preserved and machine code cached on disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import njit
from numba.extending import register_jitable

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

CACHE = Path(__file__).parent / "__pycache__" / f"numba-{numba.__version__}"
"""Machine code, one folder for each version of numba. If it is not writable, numba uses the user's cache folder.

numba discards a function's whole cache when another version of it wrote it. Environments that share this source tree, as those
of two engines do, would compile everything again each time the other had run: for 20 seconds, in any process.
"""


def kernel(function: FunctionT) -> FunctionT:
    """Compile `function` on first call (machine code is cached in `CACHE`, or where NUMBA_CACHE_DIR says) without the GIL.

    With NUMBA_DISABLE_JIT=1 in the environment the same function runs as plain Python, which is slow but debuggable.
    """
    with _cache_of_this_version():
        return cast(FunctionT, njit(cache=True, nogil=True)(function))


def jitable(function: FunctionT) -> FunctionT:
    """Compile `function` as a part of the kernels that call it; from Python it is the plain function.

    numba's cache notices a changed file only by the kernel's own: keep both in one file where the function may change.
    """
    return cast(FunctionT, register_jitable(function))


@contextmanager
def _cache_of_this_version() -> Iterator[None]:
    """Numba chooses a function's cache folder when it is decorated; other packages' kernels keep theirs."""
    given = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = given or str(CACHE)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = given
