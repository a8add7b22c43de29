"""Marks for tests that import what takes seconds to import, and for tables of which every run has a part.

All tests of such a kind run in one worker, so that one pays for the import. Each imports it itself: a module's imports are paid by every
worker, while it collects tests.
"""

from collections.abc import Sequence
from typing import Any

import pytest

OFFICIAL_CLIENT = pytest.mark.xdist_group("official clients")
"""Imports a client's library (openai, anthropic)."""

TORCH = pytest.mark.xdist_group("vllm")
"""Imports torch, which the worker of the tests with vLLM has loaded."""

VLLM = (pytest.mark.vllm, TORCH)
"""Runs the real vLLM, in the one worker that has loaded it."""

BOTH_ENGINES = (pytest.mark.vllm, pytest.mark.sglang, pytest.mark.xdist_group("sglang"))
"""Runs vLLM and SGLang, in one worker with SGLang's other tests."""

SGLANG_HERE = (pytest.mark.sglang, pytest.mark.filterwarnings("ignore"))
"""Runs the real SGLang in this process, whose libraries' warnings are not ours to fail on."""

CLIENTS = (pytest.mark.processes, pytest.mark.xdist_group("clients"))
"""Asks the fleet of the folder with bad clients, which its tests share."""


def grid(first: Sequence[Any], second: Sequence[Any], each: int) -> list[Any]:
    """All pairs as parameters. In every run each of `first` meets `each` of `second`, in turn; the other pairs are of the long form.

    A tuple in `first` is several parameters.
    """
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            other,
            marks=() if (at - place) % len(second) < each else pytest.mark.soak,
        )
        for place, one in enumerate(first)
        for at, other in enumerate(second)
    ]
