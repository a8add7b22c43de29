"""LoRA adapters made by tests, and an engine that holds some: the simulator with slots."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headwater.engines.engine import Emit, EngineError, EngineInfo, LoraAdapter, RequestRejected, Transfer
from headwater.engines.lora_cache import LoraCache, LoraPolicy
from headwater.engines.lora_sources import CONFIG, WEIGHTS, parse_networks, parse_sources
from headwater.engines.sim.engine import SimEngine
from headwater.schemas.inference import GenerateRequest
from headwater.schemas.tables import Capability

SMALL = {"base_model.model.model.layers.0.self_attn.v_proj": (8, 8)}
"""Outputs and inputs of the one layer that a small adapter changes."""


def make_adapter(
    folder: Path,
    seed: int = 1,
    *,
    rank: int = 4,
    layers: Mapping[str, tuple[int, int]] = SMALL,
    scale: float = 1.0,
    **config: Any,
) -> Path:
    """An adapter in PEFT's layout: normal random matrices of this `scale`, other ones for other seeds."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for name, (outputs, inputs) in layers.items():
        tensors[f"{name}.lora_A.weight"] = random.normal(0, scale, (rank, inputs)).astype("<f4")
        tensors[f"{name}.lora_B.weight"] = random.normal(0, scale, (outputs, rank)).astype("<f4")
    (folder / WEIGHTS).write_bytes(safetensors(tensors))
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        **config,
    }
    (folder / CONFIG).write_text(json.dumps(document))
    return folder


def safetensors(tensors: Mapping[str, Any]) -> bytes:
    """A safetensors file of float32 arrays."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        packed = tensor.tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(packed)],
        }
        data += packed
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def files(root: Path, *sources: object, networks: tuple[str, ...] = (), **limits: Any) -> LoraCache:
    """A cache in `root` that may fetch from these sources."""
    prefixes = parse_sources([str(source) for source in sources])
    return LoraCache(root, LoraPolicy(prefixes, parse_networks(networks), **limits))


class LoraSim(SimEngine):
    """The simulator with slots for adapters: it takes requests for those that are loaded, and no others.

    `fails` names what it refuses; `seen` is the adapter of each request that it took.
    """

    capabilities: frozenset[Capability] = SimEngine.capabilities | {"lora"}
    slots = 2
    rank_max = 16

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.loaded: dict[str, LoraAdapter] = {}
        self.seen: list[str] = []
        self.fails: list[str] = []

    async def start(self) -> EngineInfo:
        info = await super().start()
        return info._replace(lora_slots=self.slots, lora_rank_max=self.rank_max)

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        if request.lora_name and request.lora_name not in self.loaded:
            raise RequestRejected(f"adapter {request.lora_name} is not loaded")
        self.seen.append(request.lora_name)
        super().submit(request, emit, transfer)

    async def load_lora(self, adapter: LoraAdapter) -> None:
        if "load" in self.fails:
            raise EngineError("the engine can not")
        assert adapter.name not in self.loaded
        assert len(self.loaded) < self.slots, "more than it said"
        assert (Path(adapter.folder) / WEIGHTS).is_file()
        self.loaded[adapter.name] = adapter
        # A real one takes its time.
        for _ in range(5):
            await asyncio.sleep(0)
        if "lora" in SimEngine.capabilities:
            await super().load_lora(adapter)

    async def unload_lora(self, name: str) -> None:
        if "unload" in self.fails:
            raise EngineError("the engine can not")
        running = [one for one in self._by_id.values() if one.request.lora_name == name]
        assert not running, f"{name} is taken from under {running}"
        if "lora" in SimEngine.capabilities:
            await super().unload_lora(name)
        self.loaded.pop(name, None)
