"""Makes PyPI's torchvision importable with a CPU build of torch. Imported at the start of every Python of the tests' environments.

Its compiled operators are linked against CUDA's libtorch and do not load there. Their schemas are declared instead, which is all that an import
asks for: nothing that the engines use of it is compiled.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Declares the operators before the first import of torchvision."""

    def __init__(self) -> None:
        self._library: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision" and self._library is None:
            import torch

            self._library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self._library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _Finder())
