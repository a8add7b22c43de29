"""How hot loops are compiled: numba, kept typed for the checker and cached on disk."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def kernel(function: FunctionT) -> FunctionT:
    """Compile `function` on first call (machine code is cached next to its file) without the GIL.

    With the environment's NUMBA_DISABLE_JIT=1 the same function runs as plain Python: slow, debuggable,
    and a check that nothing depends on the compiler.
    """
    return cast(FunctionT, njit(cache=True, nogil=True)(function))
