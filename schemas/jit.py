"""Hot loops that numba compiles, with types preserved.

Numba takes a quarter of a second to import, and most commands compute nothing: the first call of any kernel imports it. Until then a
kernel is a stand-in, whose place the compiled one takes in all modules of Headwater, so that later calls take no detour.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_functions: Final[dict[Callable[..., Any], "_StandIn | None"]] = {}
"""The plain functions of this process's kernels, with their stand-ins, and of what is `jitable`, in the order in which they are defined."""

_loading = threading.RLock()
_loaded = False


class _StandIn:
    """A kernel that is not compiled yet."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.py_func = function
        """As numba calls it."""
        self.compiled: Any = None

    def __call__(self, *arguments: Any) -> Any:
        load()
        return self.compiled(*arguments)


def kernel(function: FunctionT) -> FunctionT:
    """Compile `function` on first call (machine code is cached on disk, or where NUMBA_CACHE_DIR says, if possible) without the GIL.

    With NUMBA_DISABLE_JIT=1 in the environment the same function runs as plain Python, which is slow but debuggable.
    """
    stand_in = _StandIn(function)
    _define(function, stand_in)
    return cast(FunctionT, stand_in.compiled or stand_in)


def jitable(function: FunctionT) -> FunctionT:
    """Compile `function` as a part of the kernels that call it, which are defined after it; from Python it is the plain function."""
    _define(function, None)
    return function


def _define(function: Callable[..., Any], stand_in: _StandIn | None) -> None:
    with _loading:
        _functions[function] = stand_in
        if _loaded:
            _compile(function)


def load() -> None:
    """Import numba, and replace all stand-ins. It does nothing the second time."""
    global _loaded
    with _loading:
        if _loaded:
            return
        for function in list(_functions):
            _compile(function)
        _loaded = True
        modules = [
            vars(module) for name, module in list(sys.modules.items()) if name.startswith("headwater.")
        ]
        for names in (*modules, *(function.__globals__ for function in _functions)):
            for name, global_value in list(names.items()):
                if isinstance(global_value, _StandIn):
                    names[name] = global_value.compiled


def _compile(function: Callable[..., Any]) -> None:
    from headwater.schemas import machine_code

    stand_in = _functions[function]
    if stand_in is None:
        machine_code.allow_in_kernels(function)
    else:
        stand_in.compiled = machine_code.compiled(function, _functions)
