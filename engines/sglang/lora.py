"""LoRA adapters in one SGLang: those that requests may use.

SGLang loads an unloaded adapter again as soon as a request names it, and evicts adapters beyond its limit. Both are kept
from happening: requests for an adapter that is not in this table are rejected, and it has no more entries than slots.
"""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from headwater.engines.control_rules import check_loaded
from headwater.engines.engine import EngineDied, EngineError, LoraAdapter
from headwater.engines.lora_files.peft import HEADER_BYTES_MAX

FUSED: Final = ("q_proj", "v_proj")
"""SGLang computes queries, keys and values with one matrix. An adapter for one of them without these ends its scheduler at
the first request, and with it the engine."""

Call = Callable[[Awaitable[Any]], Awaitable[Any]]


class SglangLoras:
    """The adapters of an engine with these slots. Calls SGLang, and records only what SGLang accepted."""

    def __init__(self, manager: Any, call: Call, slots: int, rank_max: int) -> None:
        self._manager = manager
        self._call = call
        self.slots = slots
        self.rank_max = rank_max
        self._loaded: dict[str, LoraAdapter] = {}

    def check(self, name: str) -> None:
        """Raises `RequestRejected` for an adapter that is not loaded."""
        check_loaded(name, self._loaded)

    async def load(self, adapter: LoraAdapter) -> None:
        """See `Engine.load_lora`. Idempotent for the same folder."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        at = self._loaded.get(adapter.name)
        if at is not None:
            if at == adapter:
                return
            raise EngineError(f"adapter {adapter.name!r} is loaded from other files: unload it first")
        if adapter.rank > self.rank_max:
            raise EngineError(
                f"adapter {adapter.name!r} has rank {adapter.rank}, this engine supports up to {self.rank_max}: "
                "start it with a larger --max-lora-rank"
            )
        if len(self._loaded) >= self.slots:
            raise EngineError(f"all {self.slots} LoRA slots are in use: {', '.join(sorted(self._loaded))}")
        _check_fused(adapter)
        request = LoadLoRAAdapterReqInput(lora_name=adapter.name, lora_path=adapter.folder, pinned=False)
        await self._done(self._manager.load_lora_adapter, request, f"cannot load adapter {adapter.name!r}")
        self._loaded[adapter.name] = adapter

    async def unload(self, name: str) -> None:
        """See `Engine.unload_lora`. Unknown names are fine. If it fails, requests for it are rejected all the same."""
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        if self._loaded.pop(name, None) is None:
            return
        request = UnloadLoRAAdapterReqInput(lora_name=name)
        try:
            await self._done(self._manager.unload_lora_adapter, request, f"cannot unload adapter {name!r}")
        finally:
            # From this table it would load the adapter again for a request.
            getattr(self._manager, "lora_ref_cache", {}).pop(name, None)

    async def _done(self, method: Any, request: Any, what: str) -> None:
        """SGLang reports most failures in its answer, not by an exception."""
        try:
            result = await self._call(method(request, None))
        except EngineDied:
            raise
        except Exception as error:  # after any exception of SGLang the adapter is not loaded
            raise EngineError(f"SGLang {what}: {error}") from error
        if not result.success:
            raise EngineError(f"SGLang {what}: {result.error_message}")


def _check_fused(adapter: LoraAdapter) -> None:
    """Raises `EngineError` for an adapter that would end the engine."""
    try:
        names = _weights(Path(adapter.folder))
    except (OSError, ValueError) as error:
        raise EngineError(f"adapter {adapter.name!r} cannot be read: {error}") from error
    parts = {part for name in names for part in name.split(".")}
    missing = [part for part in FUSED if part not in parts]
    if missing and parts & {"q_proj", "k_proj", "v_proj"}:
        raise EngineError(
            f"adapter {adapter.name!r} has no weights for {missing[0]}: SGLang needs those of q_proj and v_proj in an "
            "adapter with any of q_proj, k_proj and v_proj"
        )


def _weights(folder: Path) -> list[str]:
    """Names of an adapter's matrices, from the header of its file. Raises `ValueError` and `OSError`."""
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} has no adapter_config.json")
    with (folder / "adapter_model.safetensors").open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= HEADER_BYTES_MAX:
            raise ValueError("adapter_model.safetensors is no safetensors file")
        header = json.loads(file.read(length))
    return [name for name in header if name != "__metadata__"]
