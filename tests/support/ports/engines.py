"""The engines of the contract tests. An engine under test is an `EngineCase`, as `headwater check-engine` has it."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwater.engines.conformance.case import (
    Answer,
    Copies,
    EngineCase,
    KvFold,
    MakeEngine,
    apply,
    rebuilt,
    started,
)
from headwater.engines.engine import Engine, EngineDied
from headwater.engines.native_arguments import tokens_of
from headwater.engines.sglang import SglangOptions
from headwater.engines.sim import StepTime
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.engines.vllm import VllmOptions
from headwater.ops.start.sockets import free_range
from headwater.schemas.clock import SystemClock
from tests.support.engines.settings import engine_settings, with_fields
from tests.support.sglang import environment

__all__ = ["Answer", "Copies", "EngineCase", "KvFold", "MakeEngine", "apply", "rebuilt", "started"]

ONLY_TOKEN = f"tests.support.engines.only_token{'_sglang' if environment.HERE else ''}:OnlyToken"
"""A logits processor for the real engine that is installed here."""

MakeRealEngine = Callable[..., Engine]
"""Makes a real engine that is not started, with these fields of its settings."""

EOS = 2
"""The small model's end of an answer, and the simulated engine's."""


def sim_engine(step_time: StepTime, *, small: bool = False) -> Engine:
    """A simulated engine whose answers are easy to tell apart from prompts."""
    settings = SimSettings(
        total_blocks=20 if small else 4_096,
        context_length=512 if small else 8_192,
        step_time=step_time,
        script=tuple(range(300, 400)),
        eos_token_id=EOS,
    )
    return SimEngine(settings, SystemClock())


def vllm_engine(
    model: str, *, small: bool = False, kv_cache_mib: int = 512, native: tuple[str, ...] = (), **settings: Any
) -> Engine:
    """A real engine with the small model. `settings` are fields of a worker and of vLLM's options."""
    from headwater.engines.vllm.engine import VllmEngine

    words = (f"--kv-cache-memory-bytes={kv_cache_mib << 20}", *native)
    made = engine_settings(VllmOptions(), model)
    if small:
        made = with_fields(made, max_model_len=512)
        words = (*words, "--num-gpu-blocks-override=22")
    return VllmEngine(with_fields(made, native=words, **settings))


def full_vllm_engine(model: str) -> Engine:
    """A real engine with adapters, priorities and a logits processor that is called `only`."""
    return vllm_engine(
        model,
        max_model_len=1024,
        kv_cache_mib=128,
        logits_processors={"only": ONLY_TOKEN},
        native=("--enable-lora", "--max-loras=2", "--max-lora-rank=8", "--scheduling-policy=priority"),
    )


def pooling_vllm_engine(model: str) -> Engine:
    """A real engine that makes vectors: of the small model's last state, as good as any for a test."""
    return vllm_engine(model, max_model_len=512, kv_cache_mib=64, native=("--runner=pooling",))


def nixl_engine(model: str) -> Engine:
    """A real engine that hands its KV over and takes that of others. Start it before the next one is made."""
    # VLLM takes the place of its side channel from the environment only.
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    return vllm_engine(model, max_model_len=1024, kv_cache_mib=128, connector="nixl")


def sglang_engine(model: str, *, small: bool = False, **settings: Any) -> Engine:
    """A real SGLang with the small model. `settings` are fields of a worker and of SGLang's options, `given` its own arguments by name."""
    from headwater.engines.sglang.engine import SglangEngine

    own: dict[str, Any] = {"max_total_tokens": 20 * 32, "context_length": 512} if small else {}
    own |= {"skip_tokenizer_init": True} | settings.pop("given", {})
    made = engine_settings(SglangOptions(native=tokens_of(own, "given")), model)
    return SglangEngine(with_fields(made, **settings))


def full_sglang_engine(model: str) -> Engine:
    """A real SGLang with a tokenizer for guides, adapters, priorities and a logits processor that is called `only`."""
    return sglang_engine(
        model,
        max_model_len=1024,
        logits_processors={"only": ONLY_TOKEN},
        given={
            "skip_tokenizer_init": False,
            "enable_priority_scheduling": True,
            "schedule_low_priority_values_first": True,
            "enable_lora": True,
            "lora_backend": "torch_native",
            "lora_target_modules": ["o_proj", "q_proj", "v_proj"],
            "max_lora_rank": 8,
            "max_loaded_loras": 3,
            # The base model takes a place as well.
            "max_loras_per_batch": 3,
        },
    )


def pooling_sglang_engine(model: str) -> Engine:
    """A real SGLang that makes vectors: of the small model's last state, as good as any for a test."""
    return sglang_engine(model, max_model_len=512, given={"is_embedding": True})


def free_port() -> int:
    """A TCP port that nobody listens on now, and that no client is given."""
    return free_range(1, "127.0.0.1")


def family() -> dict[int, str]:
    """All processes below this one that still run: name by id."""
    below: dict[int, list[tuple[int, str]]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, rest = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            state, parent = rest.split()[:2]
            if state != "Z":
                below.setdefault(int(parent), []).append((int(folder.name), name))
    found: dict[int, str] = {}
    waiting = [os.getpid()]
    while waiting:
        for pid, name in below.get(waiting.pop(), ()):
            found[pid] = name
            waiting.append(pid)
    return found


def alive(pid: int) -> bool:
    """Does the process still run?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def death_of(engine: Engine, within_s: float = 30.0) -> str:
    """Wait until `check` says that the engine died; returns what it says."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                await engine.check()
            except EngineDied as error:
                return str(error)
            await asyncio.sleep(0.01)
