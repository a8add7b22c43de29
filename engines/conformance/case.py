"""An engine under test: requests to it, their steps, its KV events as a fold, and what a check of it is."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from headwater.engines.engine import Engine, EngineDied, EngineInfo, KvEvent, LoraAdapter, Step, Transfer
from headwater.schemas import hashing
from headwater.schemas.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.schemas.inference import GenerateRequest, Leg, Sampling
from headwater.schemas.tables import Capability

POLL_S = 0.01
ANSWER_TOKENS = 3_000
"""The length of an answer that is aborted while it runs."""

_numbers = count(1)
"""The numbers of requests: no two have the same id, as in a fleet."""


class Inapplicable(Exception):
    """A check says nothing about this engine; the message says why."""


async def eventually(condition: Callable[[], bool], *, within_s: float = 30.0) -> None:
    """Return once `condition()` holds. Fails after `within_s`, which is meant to be generous."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not condition():
        assert loop.time() < deadline, f"not within {within_s} s: {condition}"
        await asyncio.sleep(POLL_S)


MakeAdapter = Callable[[str, int, int], LoraAdapter]
"""Makes the LoRA adapter of this name, with the weights of this variant and of this rank."""


def _named_adapter(name: str, variant: int, rank: int) -> LoraAdapter:
    """An adapter without files."""
    return LoraAdapter(name, "", rank)


Copies = Counter[tuple[int, int, int]]
"""Copies held of each (rank, tier, sequence hash)."""


class Answer:
    """The steps of one request, as `emit` got them."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._begun = asyncio.Event()

    def emit(self, step: Step) -> None:
        """Take one step. Not judged here, within the engine's own code."""
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
        """What the engine reported once of the prompt's cached part, -1 before that."""
        reported = [step.cached_tokens for step in self.steps if step.cached_tokens >= 0]
        assert len(reported) <= 1, f"reported {reported}"
        return reported[0] if reported else -1

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

    def __init__(self, engine: Engine, info: EngineInfo, make_adapter: MakeAdapter = _named_adapter) -> None:
        self.engine = engine
        self.info = info
        self._make_adapter = make_adapter
        self.kv = KvFold()
        self._random = random.Random(7)

    @property
    def has_adapter_files(self) -> bool:
        """Do its LoRA adapters have files?"""
        return self._make_adapter is not _named_adapter

    def adapter(self, name: str, variant: int, rank: int = 0) -> LoraAdapter:
        """A LoRA adapter: of another variant it has other weights."""
        return self._make_adapter(name, variant, rank or min(4, self.info.lora_rank_max))

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

    async def running(self, tokens: int = ANSWER_TOKENS) -> tuple[GenerateRequest, Answer]:
        """A request that runs. A prompt of that length too where an engine's answers end early."""
        for blocks in (1.5, tokens / self.info.block_size):
            length = min(tokens, self.info.context_length - int(blocks * self.info.block_size) - 1)
            if length > 0:
                request = self.request(self.prompt(blocks), max_tokens=length)
                answer = self.submit(request)
                await answer.begun()
                if not answer.finish:
                    return request, answer
        raise Inapplicable("its answers end too soon to be interrupted")

    async def idle(self) -> None:
        """Wait until the engine runs nothing."""
        await eventually(lambda: self.engine.load()[:2] == (0, 0))

    async def settle(self) -> None:
        """Wait until all events so far have been read: events come in order, so until those of another prompt have."""
        prompt = self.prompt(1.5)
        await self.generate(prompt, max_tokens=1)
        await self.holds(self.hashes(prompt))

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


@asynccontextmanager
async def started(engine: Engine, make_adapter: MakeAdapter = _named_adapter) -> AsyncIterator[EngineCase]:
    """The engine, started, with a reader of its KV events; stopped at the end of the block."""
    case = EngineCase(engine, await engine.start(), make_adapter)
    reader = asyncio.create_task(case.kv.run(engine))
    try:
        yield case
        assert not reader.done(), reader
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await engine.stop()


# A check: an async function whose assertions hold for every engine that has certain capabilities.

Subject = Literal["one", "pair", "new"]
"""What a check runs on: a running engine, two that can hand over to each other, or engines that it starts itself."""


class Check(NamedTuple):
    """One check. `needs` are the capabilities without which it does not apply; `text` is what must hold."""

    name: str
    text: str
    run: Callable[..., Awaitable[None]]
    needs: tuple[Capability, ...] = ()
    subject: Subject = "one"


def check(*needs: Capability, subject: Subject = "one") -> Callable[[Callable[..., Awaitable[None]]], Check]:
    """Make a function a check, named after it; its docstring says what must hold."""

    def made(function: Callable[..., Awaitable[None]]) -> Check:
        name = getattr(function, "__name__", "").replace("_", " ")
        return Check(name, " ".join((function.__doc__ or "").split()), function, needs, subject)

    return made


def checks_of(module: ModuleType) -> tuple[Check, ...]:
    """The checks in a module, in their order there."""
    return tuple(one for one in vars(module).values() if isinstance(one, Check))


@contextmanager
def raises(kind: type[Exception], match: str = "") -> Iterator[None]:
    """The block must raise an exception of this kind whose text matches."""
    try:
        yield
    except kind as error:
        raised: Exception = error
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
    assert re.search(match, str(raised)), f"{raised!r} does not match {match!r}"


# Checks of ending: a stop leaves nothing behind.


@check("generate", subject="new")
async def stop_aborts_what_runs(make: MakeEngine) -> None:
    """Every request gets its last step, the one just submitted too."""
    async with started(make()) as case:
        running = [await case.running() for _ in range(2)]
        if any(answer.finish for _, answer in running):
            raise Inapplicable("its answers end too soon to be interrupted")
        fresh = case.submit(case.request(case.prompt(1.5), max_tokens=100))
        await case.engine.stop()
        for answer in (*(answer for _, answer in running), fresh):
            await answer.ended()
            assert [step.finish for step in answer.steps if step.finish] == ["abort"]


@check(subject="new")
async def stop_is_fine_twice_and_before_the_start(make: MakeEngine) -> None:
    """Whatever cleans up need not know how far a start had come."""
    engine = make()
    await engine.stop()
    await engine.stop()


async def has_died(case: EngineCase) -> bool:
    """Does the engine say that it has died?"""
    try:
        await case.engine.check()
    except EngineDied:
        return True
    return False
