"""LoRA adapters in one vLLM: their ids, slots, and changed files."""

from collections.abc import Awaitable, Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from headwater.engines.control_rules import check_loaded
from headwater.engines.engine import EngineError, LoraAdapter


class LoadedLora(NamedTuple):
    """An adapter loaded in vLLM; `content` distinguishes its files from others of the same name."""

    request: Any
    content: str


def number(name: str) -> int:
    """VLLM's id of an adapter: the same for a name in every engine and incarnation, above 0, 31 bits."""
    return (int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF) or 1


class Loras:
    """The adapters of an engine with these slots. Calls vLLM, and records only what vLLM accepted."""

    def __init__(self, engine: Any, slots: int, rank_max: int, clear: Callable[[], Awaitable[None]]) -> None:
        self._engine = engine
        self._clear = clear
        self.slots = slots
        self.rank_max = rank_max
        self._loaded: dict[str, LoadedLora] = {}
        self._had: dict[str, str] = {}

    def request(self, name: str) -> Any:
        """VLLM's LoRARequest, None for no adapter. Raises `RequestRejected` for one that is not loaded."""
        if not name:
            return None
        check_loaded(name, self._loaded)
        return self._loaded[name].request

    async def load(self, adapter: LoraAdapter) -> None:
        """See `Engine.load_lora`. Idempotent for the same files."""
        from vllm.lora.request import LoRARequest

        content = _content(adapter)
        at = self._loaded.get(adapter.name)
        if at is not None:
            if at.content == content:
                return
            raise EngineError(f"adapter {adapter.name!r} is loaded from other files: unload it first")
        if adapter.rank > self.rank_max:
            raise EngineError(
                f"adapter {adapter.name!r} has rank {adapter.rank}, this engine supports up to {self.rank_max}: "
                "start it with a larger max_lora_rank"
            )
        if len(self._loaded) >= self.slots:
            raise EngineError(f"all {self.slots} LoRA slots are in use: {', '.join(sorted(self._loaded))}")
        clash = [name for name in self._loaded if number(name) == number(adapter.name)]
        if clash:
            raise EngineError(f"adapter {adapter.name!r} has the same id as {clash[0]!r}: rename one of them")
        # VLLM distinguishes cached blocks of adapters by name: those of other files with this name are removed.
        if self._had.get(adapter.name, content) != content:
            await self._clear()
        request = LoRARequest(adapter.name, number(adapter.name), adapter.folder)
        try:
            taken = await self._engine.add_lora(request)
        except Exception as error:  # after any exception of vLLM the adapter is not loaded
            raise EngineError(f"vLLM cannot load adapter {adapter.name!r}: {error}") from error
        # In data parallel vLLM returns one result for all ranks, older releases none.
        if taken is False:
            raise EngineError(f"vLLM rejected adapter {adapter.name!r} from {adapter.folder}")
        self._loaded[adapter.name] = LoadedLora(request, content)
        self._had[adapter.name] = content

    async def unload(self, name: str) -> None:
        """See `Engine.unload_lora`. Unknown names are fine."""
        found = self._loaded.pop(name, None)
        if found is not None:
            await self._engine.remove_lora(found.request.lora_int_id)

    async def load_again(self) -> None:
        """Load all of them again after their memory was released."""
        for found in self._loaded.values():
            await self._engine.remove_lora(found.request.lora_int_id)
            await self._engine.add_lora(found.request)


def _content(adapter: LoraAdapter) -> str:
    """Digest of name, size and time of every file, to detect other weights under the same name."""
    digest = blake2b(digest_size=16)
    folder = Path(adapter.folder)
    if not (folder / "adapter_config.json").is_file():
        raise EngineError(f"adapter {adapter.name!r}: {adapter.folder} has no adapter_config.json")
    for path in sorted(folder.iterdir()):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
