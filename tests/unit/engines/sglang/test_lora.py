"""Adapters in an SGLang: those that would end it are rejected before it sees them."""

from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.engines.engine import EngineError, LoraAdapter, RequestRejected
from headwater.engines.sglang import control
from headwater.engines.sglang.control import SglangLoras
from tests.support.engines.adapters import make_adapter

LAYER = "base_model.model.model.layers.0.self_attn"


async def call(awaitable: Awaitable[Any]) -> Any:
    """What the engine does with a call."""
    return await awaitable


def adapter(folder: Path, *parts: str) -> LoraAdapter:
    """An adapter for these parts of a layer."""
    made = make_adapter(folder, layers={f"{LAYER}.{part}": (8, 8) for part in parts})
    return LoraAdapter("a", str(made), 4)


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        (("v_proj",), "q_proj"),
        (("q_proj", "k_proj"), "v_proj"),
        (("k_proj",), "q_proj"),
        (("q_proj", "v_proj", "o_proj"), ""),
        (("o_proj",), ""),
    ],
)
def test_an_adapter_without_queries_or_values_is_rejected(
    tmp_path: Path, parts: tuple[str, ...], missing: str
) -> None:
    """If it has any of the three: SGLang dies of it at the first request."""
    if missing:
        with pytest.raises(EngineError, match=f"has no weights for {missing}"):
            control._check_fused(adapter(tmp_path, *parts))
    else:
        control._check_fused(adapter(tmp_path, *parts))


async def test_an_unloaded_adapter_is_not_loaded_again(tmp_path: Path) -> None:
    """SGLang would, for any request that names it: it forgets the adapter, and requests are rejected."""
    cache: dict[str, str] = {}

    async def load(request: Any, _: Any) -> Any:
        cache[request.lora_name] = request.lora_path
        return SimpleNamespace(success=True)

    async def unload(request: Any, _: Any) -> Any:
        return SimpleNamespace(success=False, error_message="busy")

    manager = SimpleNamespace(load_lora_adapter=load, unload_lora_adapter=unload, lora_ref_cache=cache)
    loras = SglangLoras(manager, call, 1, 8)
    with pytest.MonkeyPatch.context() as patch:
        names = ("LoadLoRAAdapterReqInput", "UnloadLoRAAdapterReqInput")
        patch.setitem(
            __import__("sys").modules,
            "sglang.srt.managers.io_struct",
            SimpleNamespace(**dict.fromkeys(names, SimpleNamespace)),
        )
        await loras.load(adapter(tmp_path, "o_proj"))
        loras.check("a")
        assert list(cache) == ["a"]
        with pytest.raises(EngineError, match="busy"):
            await loras.unload("a")
    assert not cache
    with pytest.raises(RequestRejected, match="loaded are: none"):
        loras.check("a")
