"""The GPU benchmarks' extension of vLLM's worker: scaled weights, and digests of the KV cache.

vLLM imports this module in its worker as the worker extension (`WEIGHTS_EXTENSION`), which registers the loader.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from tests.bench.gpu.model import LOAD_FORMAT
from tests.bench.gpu.weights import scaled

CHUNK_NUMBERS = 1 << 25
"""How many numbers of a cache are converted at once, to bound the memory of a digest."""


@register_model_loader(LOAD_FORMAT)
class RandomWeights(DummyModelLoader):
    """Weights from seeds."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill every floating-point parameter in place."""
        scaled.fill(model.named_parameters())


class ScaledWeights:
    """Methods that vLLM adds to its worker, for `collective_rpc`."""

    def kv_digests(self) -> list[bytes]:
        """Per layer (or one, where a block's layers are contiguous): an int64 for each block of the cache."""
        connector = get_kv_transfer_group().connector_worker
        return [_digests(cache, connector.num_blocks) for cache in connector.device_kv_caches.values()]


def _digests(cache: Any, blocks: int) -> bytes:
    axis = list(cache.shape).index(blocks)
    numbers = cache.movedim(axis, 0).reshape(blocks, -1)
    numbers = numbers.view(torch.int16 if numbers.element_size() == 2 else torch.int32)
    # A weighted sum, so that exchanged values change the digest.
    weights = torch.arange(numbers.shape[1], device=numbers.device) * 2_654_435_769 | 1
    step = max(1, CHUNK_NUMBERS // numbers.shape[1])
    parts = [(numbers[i : i + step].long() * weights).sum(1) for i in range(0, blocks, step)]
    packed: bytes = torch.cat(parts).cpu().numpy().tobytes()
    return packed
