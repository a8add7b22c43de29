"""The `Engine` protocol: what an engine actor needs of an engine.

One contract suite (tests/contract/test_engine.py) runs over every adapter. What an engine cannot do is said
by its `capabilities`, so that a request is refused with a name and not with a traceback.
"""

from collections.abc import AsyncIterator, Callable
from typing import Literal, NamedTuple, Protocol

from headwater.schemas.inference import GenerateRequest, TokenLogprob
from headwater.schemas.kv import BlocksCleared, BlocksRemoved, BlocksStored, KvGap

Capability = Literal["generate", "logprobs", "logit_bias", "seed", "kv_events", "kv_dump", "clear_kv"]
Finish = Literal["", "stop", "length", "abort", "error"]
KvEvent = BlocksStored | BlocksRemoved | BlocksCleared | KvGap


class EngineError(Exception):
    """Base of what engines raise."""


class EngineUnavailable(EngineError):
    """The engine cannot be started here; the message says what to install or change."""


class EngineDied(EngineError):
    """The engine is gone and takes its requests with it: the worker must end and be started again."""


class RequestRejected(EngineError):
    """The engine will not take this request, however often it is asked (too long, not supported)."""


class EngineInfo(NamedTuple):
    """What a started engine says of itself. `total_blocks` of `block_size` tokens each."""

    model: str
    block_size: int
    total_blocks: int
    max_running: int
    context_length: int


class Step(NamedTuple):
    """New tokens of one request. The step with a `finish` is the last, and there is exactly one.

    `cached_tokens` is how many prompt tokens were not computed anew; -1 where this step does not tell.
    """

    tokens: tuple[int, ...]
    finish: Finish = ""
    cached_tokens: int = -1
    logprobs: tuple[TokenLogprob, ...] = ()
    detail: str = ""


class EngineLoad(NamedTuple):
    """Requests running and waiting, KV blocks in use and in all."""

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int


Emit = Callable[[Step], None]


class Engine(Protocol):
    """One engine instance. Every method is called from the event loop that called `start`."""

    name: str
    capabilities: frozenset[Capability]

    async def start(self) -> EngineInfo:
        """Load the model and get ready. Raises `EngineUnavailable`."""
        ...

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        """Begin to generate. `emit` is called on the event loop for each step, never before this returns.

        Raises `RequestRejected` at once for a request that can never work.
        """
        ...

    def abort(self, request: str) -> None:
        """Stop a request soon: its last step says abort. Unknown ids are ignored."""
        ...

    def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """KV-cache events as they happen, with our own sequence hashes. One reader."""
        ...

    def held_blocks(self) -> list[BlocksStored]:
        """Everything cached now, parents before children: `BlocksCleared` and these rebuild the index.

        Events from before that `kv_events` has not yielded yet are dropped: they are in here.
        """
        ...

    def load(self) -> EngineLoad:
        """Present load."""
        ...

    async def clear_kv(self) -> None:
        """Forget all cached blocks that no running request uses."""
        ...

    async def check(self) -> None:
        """Return if the engine is alive. Raises `EngineDied`."""
        ...

    async def stop(self) -> None:
        """End the engine and every process of it."""
        ...
