"""A weight loader for vLLM that makes answers depend on the whole prompt.

vLLM's own dummy weights lie within ±0.001, norms included. With them the next token follows from the last one
alone, and two engines answer alike whatever their KV caches hold: no test of a transfer. Here weights are
normally distributed and norms are 1, with seeds taken from the parameters' names: the same in every process.

vLLM imports this module in its worker as the worker extension (`WEIGHTS_EXTENSION`), which registers the loader.
"""

import zlib
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from headwater.ops.bench.gpu_model import LOAD_FORMAT

DEVIATION = 0.02


@register_model_loader(LOAD_FORMAT)
class RandomWeights(DummyModelLoader):  # type: ignore[misc]
    """Weights from seeds."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill every floating-point parameter in place."""
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if "norm" in name:
                parameter.data.fill_(1.0)
                continue
            generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(name.encode()))
            parameter.data.normal_(0.0, DEVIATION, generator=generator)


class Extension:
    """Nothing: vLLM loads this class, and with it the loader above."""
