"""Compilation of hot loops: numba, with types preserved and machine code cached on disk."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def kernel(function: FunctionT) -> FunctionT:
    """Compile `function` on first call (machine code is cached next to its file) without the GIL.

    With NUMBA_DISABLE_JIT=1 in the environment the same function runs as plain Python, which is slow but debuggable.
    """
    return cast(FunctionT, njit(cache=True, nogil=True)(function))
