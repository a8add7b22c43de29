"""Operations of SGLang other than generation: LoRA, sleep, pause, profiles, embeddings, clearing the cache.

SGLang loads an unloaded adapter again as soon as a request names it, and evicts adapters beyond its limit. Neither
happens here: requests for an adapter that is not in `SglangLoras` are rejected, and it has no more entries than slots.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

from headwater.engines import lora_sources
from headwater.engines.engine import (
    EngineDied,
    EngineError,
    LoraAdapter,
    PauseMode,
    RequestRejected,
    check_adapter,
    check_loaded,
    check_text_only,
)
from headwater.engines.ranked import RankedEngineBase
from headwater.engines.sglang.media import SglangMedia
from headwater.engines.sglang.process import SglangProcess, SglangRank
from headwater.engines.sglang.sampling import ModelPooling, Stream, finish_of
from headwater.engines.sglang.signatures import Signatures
from headwater.engines.traits import EngineTraces
from headwater.schemas import hashing
from headwater.schemas.inference import EmbedRequest, GenerateRequest
from headwater.schemas.media import PromptMedia

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
        check_adapter(adapter, self._loaded, self.slots, self.rank_max, "--max-lora-rank")
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

    async def _done(self, method: Any, request: Any, failure: str) -> None:
        """SGLang reports most failures in its answer, not by an exception."""
        try:
            result = await self._call(method(request, None))
        except EngineDied:
            raise
        except Exception as error:  # after any exception of SGLang the adapter is not loaded
            raise EngineError(f"SGLang {failure}: {error}") from error
        if not result.success:
            raise EngineError(f"SGLang {failure}: {result.error_message}")


def _check_fused(adapter: LoraAdapter) -> None:
    """Raises `EngineError` for an adapter that would end the engine."""
    from safetensors import SafetensorError

    try:
        names = _weights(Path(adapter.folder))
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineError(f"adapter {adapter.name!r} cannot be read: {error}") from error
    parts = {part for name in names for part in name.split(".")}
    missing = [part for part in FUSED if part not in parts]
    if missing and parts & {"q_proj", "k_proj", "v_proj"}:
        raise EngineError(
            f"adapter {adapter.name!r} has no weights for {missing[0]}: SGLang needs those of q_proj and v_proj in an "
            "adapter with any of q_proj, k_proj and v_proj"
        )


def _weights(folder: Path) -> list[str]:
    """Names of an adapter's matrices. Raises `ValueError`, `OSError` and `SafetensorError`."""
    from safetensors import safe_open

    if not (folder / lora_sources.CONFIG).is_file():
        raise ValueError(f"{folder} has no {lora_sources.CONFIG}")
    with safe_open(folder / lora_sources.WEIGHTS, framework="numpy") as file:
        return list(file.keys())


# Operations.

T = TypeVar("T")

FLUSH_S: Final = 2.0
"""How long a clear waits for the scheduler to finish the step that it is in."""

KV_CACHE: Final = "kv_cache"
WEIGHTS: Final = "weights"


class SglangControl(RankedEngineBase[SglangRank, SglangLoras]):
    """The optional part of the `Engine` protocol for SGLang: base of `SglangEngine`."""

    name = "sglang"

    def __init__(self) -> None:
        super().__init__(SglangLoras(None, self._call, 0, 0))
        self._manager: Any = None
        self._process: SglangProcess | None = None
        self._signatures = Signatures({})
        self._streams: dict[str, Stream] = {}
        self._model = ""
        self._input_max = 0
        self._keeps_weights = False
        self._pooling = ModelPooling()
        self._media: SglangMedia | None = None
        self._traces: EngineTraces | None = None

    def _trace_fields(self, request: GenerateRequest | EmbedRequest) -> dict[str, Any]:
        """The field of a request of SGLang's that says whose children its spans are."""
        if self._traces is None:
            return {}
        return {"external_trace_header": self._traces.headers(request.request, request.trace)}

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`."""
        from sglang.srt.managers.io_struct import EmbeddingReqInput

        self._require("embed")
        self._pooling.check(request.task, request.segments)
        self._loras.check(request.lora_name)
        prompts = [hashing.unpack_tokens(packed).tolist() for packed in request.prompts]
        for tokens in prompts:
            if not 0 < len(tokens) < self._input_max:
                raise RequestRejected(f"{len(tokens)} tokens; 1 to {self._input_max - 1} are possible")
        media = request.media or ((),) * len(prompts)
        if self._media is None:
            check_text_only(request)
        else:
            for pair in zip(prompts, media, strict=True):
                self._media.check(*pair)
        request_fields: dict[str, Any] = {"lora_path": request.lora_name} if request.lora_name else {}
        if request.dimensions:
            request_fields["dimensions"] = request.dimensions
        request_fields |= self._trace_fields(request)
        request_fields = self._signatures.keep("EmbeddingReqInput", request_fields)

        async def one(tokens: list[int], items: tuple[PromptMedia, ...]) -> bytes:
            embedding_request = EmbeddingReqInput(
                rid=uuid4().hex, input_ids=tokens, sampling_params={}, **request_fields
            )
            if items and self._media is not None:
                # The ids of items are no field of it, but are read from it as of a GenerateReqInput.
                for name, value in (await self._media.prepare(items)).items():
                    setattr(embedding_request, name, value)
            vector = None
            async for chunk in self._manager.generate_request(embedding_request, None):
                finish, detail = finish_of(chunk["meta_info"].get("finish_reason"))
                if finish not in ("", "stop", "length"):
                    raise EngineError(f"SGLang returned no vector: {detail or finish}")
                vector = chunk["embedding"]
            if vector is None:
                raise EngineError("SGLang returned no vector")
            return self._pooling.finish(vector).astype("<f4").tobytes()

        async def all_of_them() -> tuple[bytes, ...]:
            return tuple(await asyncio.gather(*map(one, prompts, media)))

        task = asyncio.get_running_loop().create_task(all_of_them(), name=f"embed {request.request}")
        self._tasks[request.request] = task
        try:
            return await task
        except ValueError as error:
            raise RequestRejected(f"SGLang: {error}") from error
        finally:
            task.cancel()
            self._tasks.pop(request.request, None)

    async def sleep(self, level: int) -> None:
        """See `Engine.sleep`. The cache is empty from then on, before SGLang reports it. Requests that arrive wait."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        self._check_sleep(level)
        if level == 1 and not self._keeps_weights:
            raise EngineError(
                "sleep level 1 needs a copy of the weights: start it with --enable-weights-cpu-backup"
            )
        await self._hold()
        try:
            await self.clear_kv()
            tags = [KV_CACHE, WEIGHTS]
            await self._call(
                self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)
            )
        except Exception as error:  # it keeps its memory
            await self.resume()
            raise EngineError(f"SGLang cannot sleep: {error}") from error
        self._asleep = level

    async def wake(self) -> None:
        """See `Engine.wake`. After level 2 the weights are read from the disk again."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput, UpdateWeightFromDiskReqInput

        self._require("sleep")
        resume = self._manager.resume_memory_occupation
        try:
            await self._call(resume(ResumeMemoryOccupationReqInput(tags=[WEIGHTS]), None))
            if self._asleep == 2:
                request = UpdateWeightFromDiskReqInput(model_path=self._model, load_format=None)
                done, message, *_ = await self._call(self._manager.update_weights_from_disk(request, None))
                if not done:
                    raise EngineDied(f"SGLang cannot read its weights again: {message}")
            await self._call(resume(ResumeMemoryOccupationReqInput(tags=[KV_CACHE]), None))
        except EngineDied:
            raise
        except Exception as error:  # the boundary to SGLang: with a part of its weights it must not answer
            raise EngineDied(f"SGLang cannot wake: {type(error).__name__}: {error}") from error
        self._asleep = 0
        await self.resume()

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`. The cache is kept; requests that arrive wait."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._require("pause")
        await self._hold()
        if mode == "wait":
            await asyncio.gather(*self._begun(), return_exceptions=True)
        if mode == "abort":
            for stream in list(self._streams.values()):
                if self._is_begun(stream):
                    self._manager.abort_request(rid=stream.rid)
            await asyncio.gather(*self._begun(), return_exceptions=True)
        # It holds its scheduler still; what runs resumes where it was.
        await self._call(self._manager.pause_generation(PauseGenerationReqInput(mode="in_place")))

    async def resume(self) -> None:
        """See `Engine.resume`."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._require("pause")
        await self._call(self._manager.continue_generation(ContinueGenerationReqInput()))

    async def _hold(self) -> None:
        """Let requests that arrive wait before they reach the scheduler."""
        async with self._manager.is_pause_cond:
            self._manager.is_pause = True

    async def _call(self, awaitable: Awaitable[T]) -> T:
        """See `SglangProcess.call`."""
        if self._process is None:
            raise EngineDied("SGLang is not started")
        return await self._process.call(awaitable)

    def _begun(self) -> list[asyncio.Task[Any]]:
        """The tasks of requests that have reached the scheduler."""
        return [
            self._tasks[request]
            for request, stream in self._streams.items()
            if request in self._tasks and self._is_begun(stream)
        ]

    def _is_begun(self, stream: Stream) -> bool:
        state = self._manager.rid_to_state.get(stream.rid)
        return state is not None and bool(getattr(state, "dispatched", True))

    async def profile(self, *, on: bool) -> None:
        """See `Engine.profile`. Written to SGLANG_TORCH_PROFILER_DIR."""
        self._require("profile")
        try:
            await self._call(self._manager.start_profile() if on else self._manager.stop_profile())
        except Exception as error:  # a profile that runs already, for one
            raise EngineError(f"SGLang: {error}") from error

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`. SGLang clears all or nothing: rejected while a request uses a block."""
        self._require("clear_kv")
        arguments = self._signatures.keep("TokenizerManager.flush_cache", {"timeout_s": FLUSH_S})
        async with self._clearing():
            result = await self._call(self._manager.flush_cache(**arguments))
            if not result.success:
                raise EngineError("requests use blocks, and SGLang clears all or nothing: drain it first")
