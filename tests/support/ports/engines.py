"""What the tests of the `Engine` contract share: an engine under test, requests, and its KV events as a fold."""

import asyncio
import contextlib
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headwater.engines.engine import Engine, EngineInfo, KvEvent, Step, Transfer
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.engines.sim.step_time import StepTime
from headwater.schemas import hashing
from headwater.schemas.clock import SystemClock
from headwater.schemas.events.kv import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.schemas.messages.inference import GenerateRequest, Leg, Sampling
from tests.support.ports.waiting import eventually

EOS = 2
"""The small model's end of an answer, and the simulated engine's."""

_numbers = count(1)
"""Of requests: no two have the same id, as in a fleet."""

Copies = Counter[tuple[int, int, int]]
"""Copies held of each (rank, tier, sequence hash)."""


class Answer:
    """The steps of one request, as `emit` got them."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._begun = asyncio.Event()

    def emit(self, step: Step) -> None:
        """Take one step; none may follow the last."""
        self.steps.append(step)
        if step.tokens or step.finish:
            self._begun.set()

    async def begun(self, within_s: float = 60.0) -> None:
        """Wait for the first token or the end, without polling: an engine may make 700 tokens between two polls."""
        async with asyncio.timeout(within_s):
            await self._begun.wait()

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return [token for step in self.steps for token in step.tokens]

    @property
    def finish(self) -> str:
        """How it ended, empty while it has not."""
        return self.steps[-1].finish if self.steps else ""

    @property
    def cached_tokens(self) -> int:
        """What the engine told once of the prompt's cached part, -1 before that."""
        told = [step.cached_tokens for step in self.steps if step.cached_tokens >= 0]
        assert len(told) <= 1, f"told {told}"
        return told[0] if told else -1

    async def ended(self, within_s: float = 60.0) -> "Answer":
        """Wait for the last step."""
        await eventually(lambda: bool(self.finish), within_s=within_s)
        return self


class KvFold:
    """All KV events of an engine, and what a reader of them believes the engine to hold."""

    def __init__(self) -> None:
        self.events: list[KvEvent] = []
        self.held: Copies = Counter()

    async def run(self, engine: Engine) -> None:
        """Read until cancelled."""
        async for events in engine.kv_events():
            for event in events:
                self.events.append(event)
                apply(self.held, event)

    def holds(self, hashes: hashing.U64) -> bool:
        """Is each of these blocks held?"""
        return all(self.held[0, 0, number] > 0 for number in hashes.tolist())


def apply(held: Copies, event: KvEvent) -> None:
    """Fold one event as a router does. A removal of what is not held is an error here."""
    match event:
        case BlocksStored(hashes=hashes, tier=tier, rank=rank):
            for number in hashing.unpack_hashes(hashes).tolist():
                held[rank, tier, number] += 1
        case BlocksRemoved(hashes=hashes, tier=tier, rank=rank):
            for number in hashing.unpack_hashes(hashes).tolist():
                held[rank, tier, number] -= 1
                assert held[rank, tier, number] >= 0, "removed what was not stored"
        case BlocksCleared(rank=rank):
            for key in [key for key in held if key[0] == rank]:
                del held[key]
        case _:
            raise AssertionError(f"an engine that lost nothing said {event}")


class EngineCase:
    """A started engine with a reader of its KV events. `prompt` never repeats itself."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self.engine = engine
        self.info = info
        self.kv = KvFold()
        self._random = random.Random(7)

    def prompt(self, blocks: float) -> list[int]:
        """Random token ids, some blocks long: no two prompts share a block."""
        return [self._random.randrange(20, 250) for _ in range(int(blocks * self.info.block_size))]

    def hashes(self, prompt: list[int], salt: str = "", lora: str = "") -> hashing.U64:
        """Sequence hashes of a prompt's full blocks, as an edge computes them."""
        root = hashing.seed(lora, salt)
        return hashing.sequence_hashes(np.array(prompt, np.uint32), self.info.block_size, parent=root)

    def request(
        self, prompt: list[int], salt: str = "", lora: str = "", leg: Leg = "", **sampling: Any
    ) -> GenerateRequest:
        """A request with a new id; greedy unless said otherwise."""
        number = next(_numbers)
        settings = Sampling(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling})
        return GenerateRequest(
            f"r{number}-1",
            "e0",
            number,
            hashing.pack_tokens(prompt),
            settings,
            cache_salt=salt,
            lora_name=lora,
            leg=leg,
        )

    def submit(self, request: GenerateRequest, transfer: Transfer | None = None) -> Answer:
        """Begin a request."""
        answer = Answer()
        self.engine.submit(request, answer.emit, transfer)
        assert not answer.steps, "emit was called before submit returned"
        return answer

    async def generate(self, prompt: list[int], salt: str = "", lora: str = "", **sampling: Any) -> Answer:
        """One request from begin to end, until it left the engine's load."""
        answer = await self.submit(self.request(prompt, salt, lora, **sampling)).ended()
        await self.idle()
        return answer

    async def idle(self) -> None:
        """Wait until the engine runs nothing."""
        await eventually(lambda: self.engine.load()[:2] == (0, 0))

    async def holds(self, hashes: hashing.U64) -> None:
        """Wait until the events say that these blocks are held."""
        await eventually(lambda: self.kv.holds(hashes))


def rebuilt(case: EngineCase) -> Copies:
    """What `held_blocks` says, folded behind a clear."""
    held: Copies = Counter({(0, 0, 1): 1})
    apply(held, BlocksCleared())
    for event in case.engine.held_blocks():
        apply(held, event)
    return held


class MakeEngine(Protocol):
    """Makes an engine that is not started. A `small` one has a KV cache of about 20 blocks."""

    def __call__(self, *, small: bool = False) -> Engine:
        """A new engine."""
        ...


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


def vllm_engine(model: str, *, small: bool = False, **settings: Any) -> Engine:
    """A real engine with the small model. `settings` are fields of VllmSettings."""
    from headwater.engines.vllm import VllmEngine, VllmSettings

    made = VllmSettings(model=model, name="small", worker="w0", kv_cache_mib=512)
    if small:
        made = made._replace(max_model_len=512, overrides={"num_gpu_blocks_override": 22})
    return VllmEngine(made._replace(**settings))


def full_vllm_engine(model: str) -> Engine:
    """A real engine with adapters, priorities and a logits processor that is called `only`."""
    return vllm_engine(
        model,
        max_model_len=1024,
        kv_cache_mib=128,
        processors={"only": "tests.support.engines.only_token:OnlyToken"},
        overrides={"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "scheduling_policy": "priority"},
    )


def pooling_vllm_engine(model: str) -> Engine:
    """A real engine that makes vectors: of the small model's last state, as good as any for a test."""
    return vllm_engine(model, max_model_len=512, kv_cache_mib=64, overrides={"runner": "pooling"})


def nixl_engine(model: str) -> Engine:
    """A real engine that hands its KV over and takes that of others. Start it before the next one is made."""
    from vllm.config.kv_transfer import KVTransferConfig

    # VLLM takes the place of its side channel from the environment only.
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu")
    return vllm_engine(
        model, max_model_len=1024, kv_cache_mib=128, overrides={"kv_transfer_config": transfer}
    )


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def started(engine: Engine) -> AsyncIterator[EngineCase]:
    """The engine, started, with a reader of its KV events; stopped at the end of the block."""
    case = EngineCase(engine, await engine.start())
    reader = asyncio.create_task(case.kv.run(engine))
    try:
        yield case
        assert not reader.done(), reader
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await engine.stop()


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
