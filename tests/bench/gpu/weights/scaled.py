"""The weights themselves."""

import zlib
from collections.abc import Iterable
from typing import Any

import torch

DEVIATION = 0.02


def fill(parameters: Iterable[tuple[str, Any]]) -> None:
    """Fill every floating-point parameter of a model in place."""
    for name, parameter in parameters:
        if not parameter.is_floating_point():
            continue
        if "norm" in name:
            parameter.data.fill_(1.0)
            continue
        generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(name.encode()))
        parameter.data.normal_(0.0, DEVIATION, generator=generator)
