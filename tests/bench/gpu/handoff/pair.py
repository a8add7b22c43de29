"""A prefill and a decode engine, and the hand-off of one prompt."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.bench.gpu import engine as gpu_engine
from tests.bench.gpu.engine import DIGESTS, REMOTE_DECODE, BenchRequest, EngineAnswer
from tests.bench.gpu.handoff.settings import UCX_SAYS, HandoffSetting
from tests.bench.gpu.process import BenchChild

UP_S = 400.0
ANSWER_S = 120.0
TOKENS = 16
ALTERNATIVES = 5
"""Likeliest tokens whose log probabilities are compared."""


class HandOff(NamedTuple):
    """One prompt: prefilled, decoded on the other engine, generated twice by the prefill engine alone, then again by
    the decode engine from its own cache (`repeat`).

    `blocks` of `of_blocks` full blocks of the prompt are identical in both caches, in every layer.
    """

    prefill: EngineAnswer
    decode: EngineAnswer
    whole: EngineAnswer
    again: EngineAnswer
    repeat: EngineAnswer
    blocks: int
    of_blocks: int


class Answers(NamedTuple):
    """Answers to one prompt: after a hand-off, by the prefill engine alone, and by the decode engine from its cache.

    `cold` are the two engines' answers to another prompt, which each computed itself: no KV was moved.
    """

    handed: EngineAnswer
    whole: list[EngineAnswer]
    repeated: list[EngineAnswer]
    cold: tuple[EngineAnswer, EngineAnswer]


class Pair:
    """A prefill and a decode engine under one setting."""

    def __init__(self, setting: HandoffSetting, options: argparse.Namespace, model: Path, port: int) -> None:
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
            BenchChild(
                gpu_engine.serve,
                (given, connector),
                _environ(setting, options.device, rank, port + rank),
                options.out / f"{setting.label.replace('/', '-')}-{role}.log",
            )
            for rank, role in enumerate(("prefill", "decode"))
        )

    def ready(self) -> tuple[float, int]:
        """Start duration of the slower one, and its KV blocks."""
        ups = [child.receive(UP_S) for child in (self.prefill, self.decode)]
        return max(up.seconds for up in ups), ups[0].blocks

    def hand_off(self, tokens: list[int], decoded: list[int] | None = None) -> HandOff:
        """Prefill `tokens`; decode `decoded` (else the same) on their blocks; answer `decoded` on one engine."""
        decoded = decoded or tokens
        prefill = self.prefill.request(BenchRequest(tokens, 1, REMOTE_DECODE), ANSWER_S)
        decode = self.decode.request(BenchRequest(decoded, TOKENS, prefill.kv), ANSWER_S)
        # Before the next request: the blocks are free by now, and unchanged until they are reused.
        theirs, ours = (child.request(DIGESTS, ANSWER_S) for child in (self.prefill, self.decode))
        ids = _flat(prefill.kv["remote_block_ids"])[: (len(tokens) - 1) // self.setting.block_size]
        blocks = _same_blocks(theirs, ours, ids)
        whole, again = (self.prefill.request(BenchRequest(decoded, TOKENS), ANSWER_S) for _ in range(2))
        repeat = self.decode.request(BenchRequest(decoded, TOKENS), ANSWER_S)
        return HandOff(prefill, decode, whole, again, repeat, blocks, len(ids))

    def answers(self, tokens: list[int], other: list[int], length: int, times: int) -> Answers:
        """`length` tokens for a prompt: handed over, then `times` by each engine, from its own cache; and for an `other`."""
        prefill = self.prefill.request(BenchRequest(tokens, 1, REMOTE_DECODE), ANSWER_S)
        handed = BenchRequest(tokens, length, prefill.kv, ALTERNATIVES)
        alone = BenchRequest(tokens, length, None, ALTERNATIVES)
        cold = BenchRequest(other, length, None, ALTERNATIVES)
        return Answers(
            self.decode.request(handed, ANSWER_S),
            [self.prefill.request(alone, ANSWER_S) for _ in range(times)],
            [self.decode.request(alone, ANSWER_S) for _ in range(times)],
            (self.prefill.request(cold, ANSWER_S), self.decode.request(cold, ANSWER_S)),
        )

    def stop(self) -> None:
        """Kill both: there is no state to save, and an engine takes seconds to stop."""
        self.decode.stop(0.0)
        self.prefill.stop(0.0)


def _environ(setting: HandoffSetting, device: str, rank: int, port: int) -> dict[str, str]:
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
    """Block ids of the only group: vLLM has a list for each group of layers."""
    return list(ids[0]) if ids and not isinstance(ids[0], int) else list(ids)


def _same_blocks(theirs: list[bytes], ours: list[bytes], ids: list[int]) -> int:
    """How many of their blocks `ids` are identical to one of ours."""
    here = np.stack([np.frombuffer(layer, np.int64) for layer in ours])
    there = np.stack([np.frombuffer(layer, np.int64) for layer in theirs])
    places = {int(digest): place for place, digest in enumerate(here[0])}
    return sum(
        (place := places.get(int(there[0, block]))) is not None
        and bool((here[:, place] == there[:, block]).all())
        for block in ids
    )
