"""Compilation of hot loops: numba, with types preserved and machine code cached on disk."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit
from numba.extending import register_jitable

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def kernel(function: FunctionT) -> FunctionT:
    """Compile `function` on first call (machine code is cached next to its file) without the GIL.

    With NUMBA_DISABLE_JIT=1 in the environment the same function runs as plain Python, which is slow but debuggable.
    """
    return cast(FunctionT, njit(cache=True, nogil=True)(function))


def jitable(function: FunctionT) -> FunctionT:
    """Compile `function` as a part of the kernels that call it; from Python it is the plain function.

    numba's cache notices a changed file only by the kernel's own: keep both in one file where the function may change.
    """
    return cast(FunctionT, register_jitable(function))
