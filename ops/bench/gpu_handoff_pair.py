"""A prefill and a decode engine, and one prompt handed from one to the other."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headwater.ops.bench import gpu_engine
from headwater.ops.bench.gpu_engine import DIGESTS, REMOTE_DECODE, Answer, Ask
from headwater.ops.bench.gpu_handoff_settings import UCX_SAYS, Setting
from headwater.ops.bench.gpu_process import Child

UP_S = 400.0
ANSWER_S = 120.0
TOKENS = 16


class HandOff(NamedTuple):
    """One prompt: prefilled, decoded elsewhere, and answered twice by the prefill engine alone, then once more by
    the decode engine from its own cache (`repeat`).

    `blocks` of `of_blocks` whole blocks of the prompt are the same bytes in both caches, in every layer.
    """

    prefill: Answer
    decode: Answer
    whole: Answer
    again: Answer
    repeat: Answer
    blocks: int
    of_blocks: int


class Pair:
    """A prefill and a decode engine under one setting."""

    def __init__(self, setting: Setting, options: argparse.Namespace, model: Path, port: int) -> None:
        self.setting = setting
        context = max(options.lengths) + 2 * TOKENS + 1024
        given = gpu_engine.arguments(
            model, options.device, setting.block_size, context, eager=setting.eager, kv_gb=options.kv_gb
        )
        connector: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": options.device,
            "kv_connector_extra_config": setting.extra_config(),
        }
        self.prefill, self.decode = (
            Child(
                gpu_engine.serve,
                (given, connector),
                _environ(setting, options.device, rank, port + rank),
                options.out / f"{setting.label.replace('/', '-')}-{role}.log",
            )
            for rank, role in enumerate(("prefill", "decode"))
        )

    def ready(self) -> tuple[float, int]:
        """Seconds the slower one took, and its KV blocks."""
        ups = [child.hear(UP_S) for child in (self.prefill, self.decode)]
        return max(up.seconds for up in ups), ups[0].blocks

    def hand_off(self, tokens: list[int], decoded: list[int] | None = None) -> HandOff:
        """Prefill `tokens`; decode `decoded` (else the same) on their blocks; answer `decoded` on one engine."""
        decoded = decoded or tokens
        prefill = self.prefill.ask(Ask(tokens, 1, REMOTE_DECODE), ANSWER_S)
        decode = self.decode.ask(Ask(decoded, TOKENS, prefill.kv), ANSWER_S)
        # Before the next request: the blocks are free by now, and hold what they held until others need them.
        theirs, ours = (child.ask(DIGESTS, ANSWER_S) for child in (self.prefill, self.decode))
        ids = _flat(prefill.kv["remote_block_ids"])[: (len(tokens) - 1) // self.setting.block_size]
        blocks = _same_blocks(theirs, ours, ids)
        whole, again = (self.prefill.ask(Ask(decoded, TOKENS), ANSWER_S) for _ in range(2))
        repeat = self.decode.ask(Ask(decoded, TOKENS), ANSWER_S)
        return HandOff(prefill, decode, whole, again, repeat, blocks, len(ids))

    def stop(self) -> None:
        """End both at once: there is nothing to save, and an engine takes seconds to stop by itself."""
        self.decode.stop(0.0)
        self.prefill.stop(0.0)


def _environ(setting: Setting, device: str, rank: int, port: int) -> dict[str, str]:
    environ = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if device == "cpu":
        cpu = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
        }
        return {**environ, **cpu, **UCX_SAYS, **setting.environ}
    order = str(rank) if setting.visible == "own" else f"{rank},{1 - rank}"
    # FlashInfer's sampler compiles when first used.
    environ |= {"CUDA_VISIBLE_DEVICES": order, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {**environ, **UCX_SAYS, **setting.environ}


def _flat(ids: Any) -> list[int]:
    """Block ids of the only group: vLLM gives a list for each group of layers."""
    return list(ids[0]) if ids and not isinstance(ids[0], int) else list(ids)


def _same_blocks(theirs: list[bytes], ours: list[bytes], ids: list[int]) -> int:
    """How many of their blocks `ids` we have, whole, at whatever place."""
    here = np.stack([np.frombuffer(layer, np.int64) for layer in ours])
    there = np.stack([np.frombuffer(layer, np.int64) for layer in theirs])
    places = {int(digest): place for place, digest in enumerate(here[0])}
    return sum(
        (place := places.get(int(there[0, block]))) is not None
        and bool((here[:, place] == there[:, block]).all())
        for block in ids
    )
