"""The `Engine` protocol: what an engine actor needs of an engine.

One contract suite (tests/contract/test_engine.py) runs over every adapter. What an engine cannot do is said
by its `capabilities`, so that a request is refused with a name and not with a traceback: `Basic` is a base that
refuses everything optional.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Literal, NamedTuple, NoReturn, Protocol

from headwater.schemas.handoff import Choreography
from headwater.schemas.inference import EmbedRequest, GenerateRequest, TokenLogprob
from headwater.schemas.kv import BlocksCleared, BlocksRemoved, BlocksStored, KvGap

Capability = Literal[
    "generate",
    "logprobs",
    "logit_bias",
    "seed",
    "priority",
    "cache_salt",
    "guide",
    "processors",
    "embed",
    "lora",
    "handoff",
    "sleep",
    "pause",
    "profile",
    "kv_events",
    "kv_dump",
    "clear_kv",
]
Finish = Literal["", "stop", "length", "abort", "error", "rejected"]
"""abort: it was told to stop. error: the engine failed, another may go on. rejected: no engine would take it."""

DEFAULT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
"""Sampling fields for which a model may bring values of its own."""

PauseMode = Literal["abort", "wait", "keep"]
KvEvent = BlocksStored | BlocksRemoved | BlocksCleared | KvGap


class EngineError(Exception):
    """Base of what engines raise."""


class EngineUnavailable(EngineError):
    """The engine cannot be started here; the message says what to install or change."""


class EngineDied(EngineError):
    """The engine is gone and takes its requests with it: the worker must end and be started again."""


class RequestRejected(EngineError):
    """The engine will not take this request, however often it is asked (too long, not supported).

    `param` is the API's name of the field at fault, where the engine tells it.
    """

    retryable = False
    """May another worker take it?"""

    def __init__(self, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class NotSupported(RequestRejected):
    """The engine lacks a capability; `capability` names it."""

    def __init__(self, engine: str, capability: Capability) -> None:
        super().__init__(f"{engine} can not do this: it has no capability {capability!r} here")
        self.capability = capability


class EngineInfo(NamedTuple):
    """What a started engine says of itself. `total_blocks` of `block_size` tokens each.

    `pairs_with` names the engines that it can hand KV over to and take it from, by what must be equal (engine,
    version, model, type); "" where it can not. `tasks` are what it pools prompts for. `vocabulary` bounds token ids in
    sampling parameters, 0 for the tokenizer's size; `logprobs_max` are the alternatives that it gives per token. `default_sampling` are the model's own
    values of sampling fields (`DEFAULT_FIELDS`) that a request leaves out.
    """

    model: str
    block_size: int
    total_blocks: int
    max_running: int
    context_length: int
    version: str = ""
    pairs_with: str = ""
    lora_slots: int = 0
    lora_rank_max: int = 0
    tasks: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    vocabulary: int = 0
    logprobs_max: int = 20
    default_sampling: Mapping[str, float] = {}


class Pinned(NamedTuple):
    """The KV of a prompt, kept for another engine for `lease_s` seconds unless released before.

    `params` is what the other engine needs to fetch it, opaque. `first_tokens` are those that the prefill
    generated, where the decode leg begins behind them.
    """

    params: bytes
    lease_s: float
    first_tokens: tuple[int, ...] = ()


class Transfer(NamedTuple):
    """What a decode leg gets of the prefill leg: see `Pinned`."""

    params: bytes
    first_tokens: tuple[int, ...] = ()


class Step(NamedTuple):
    """New tokens of one request. The step with a `finish` is the last, and there is exactly one.

    `cached_tokens` is how many prompt tokens were not computed anew; -1 where this step does not tell. `pinned`
    comes with the last step of a prefill leg (with the first where both legs run at once), None if the prompt has
    no KV worth handing over. A prefill leg's own tokens are nobody's answer. `param` names the field that a rejected
    request is rejected for, where the engine tells it.
    """

    tokens: tuple[int, ...]
    finish: Finish = ""
    cached_tokens: int = -1
    logprobs: tuple[TokenLogprob, ...] = ()
    detail: str = ""
    pinned: Pinned | None = None
    param: str = ""


class EngineLoad(NamedTuple):
    """Requests running and waiting, KV blocks in use and in all."""

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int


class Adapter(NamedTuple):
    """A LoRA adapter on this machine: `folder` in PEFT's layout, `rank` as its configuration says."""

    name: str
    folder: str
    rank: int


Emit = Callable[[Step], None]


class Engine(Protocol):
    """One engine instance. Every method is called from the event loop that called `start`."""

    name: str
    capabilities: frozenset[Capability]
    choreography: Choreography

    async def start(self) -> EngineInfo:
        """Load the model and get ready. Raises `EngineUnavailable`."""
        ...

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """Begin to generate. `emit` is called on the event loop for each step, never before this returns.

        `request.leg` "prefill" computes the prompt and pins its KV for another engine; "decode" fetches it by
        `transfer`, which is good for one such call, and computes the prompt itself if there is none. Raises
        `RequestRejected` at once for a request that can never work.
        """
        ...

    def abort(self, request: str) -> None:
        """Stop a request soon: its last step says abort. Unknown ids are ignored."""
        ...

    async def release(self, request: str, params: bytes) -> None:
        """Give up KV pinned by the prefill leg `request`: nobody will fetch it. Twice is fine."""
        ...

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """One vector per prompt, packed little-endian float32. Raises `RequestRejected`."""
        ...

    async def load_lora(self, adapter: Adapter) -> None:
        """Make requests with this `lora_name` work. Raises `EngineError`; then nothing is loaded."""
        ...

    async def unload_lora(self, name: str) -> None:
        """Forget an adapter. Requests that use it must have ended."""
        ...

    async def sleep(self, level: int) -> None:
        """Give memory back: level 1 keeps the weights in host memory, 2 drops them. Nothing may be running."""
        ...

    async def wake(self) -> None:
        """Undo `sleep`."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating: abort what runs, wait until it has ended, or keep it where it is."""
        ...

    async def resume(self) -> None:
        """Undo `pause`."""
        ...

    async def profile(self, *, on: bool) -> None:
        """Begin or end a profile; where it is written is the engine's own setting."""
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


class Basic:
    """Base for engines: refuses every optional call by its capability's name."""

    name: str
    capabilities: frozenset[Capability]
    choreography: Choreography = "returned"

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`."""
        self._lacks("handoff")

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`."""
        self._lacks("embed")

    async def load_lora(self, adapter: Adapter) -> None:
        """See `Engine.load_lora`."""
        self._lacks("lora")

    async def unload_lora(self, name: str) -> None:
        """See `Engine.unload_lora`."""
        self._lacks("lora")

    async def sleep(self, level: int) -> None:
        """See `Engine.sleep`."""
        self._lacks("sleep")

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._lacks("sleep")

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        self._lacks("pause")

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._lacks("pause")

    async def profile(self, *, on: bool) -> None:
        """See `Engine.profile`."""
        self._lacks("profile")

    def _lacks(self, capability: Capability) -> NoReturn:
        raise NotSupported(self.name, capability)

    def _refuse_what_it_lacks(self, request: GenerateRequest) -> None:
        """Raises `NotSupported` for the first thing that a request wants and this engine has not."""
        sampling = request.sampling
        wants: tuple[tuple[bool, Capability], ...] = (
            (sampling.logprobs is not None, "logprobs"),
            (bool(sampling.logit_bias), "logit_bias"),
            (sampling.guide is not None, "guide"),
            (bool(sampling.processors), "processors"),
            (bool(request.lora_name), "lora"),
            (bool(request.leg), "handoff"),
        )
        for wanted, capability in wants:
            if wanted and capability not in self.capabilities:
                self._lacks(capability)
