"""Operations of TensorRT-LLM: LoRA adapters and sleep, the requests in it, and their hand-offs.

A hand-off is the `DisaggregatedParams` of a prefill leg as opaque bytes, from which those of a decode leg are made.
"""

import asyncio
import secrets
from abc import abstractmethod
from itertools import count
from typing import Any, ClassVar, Final

import msgspec
import structlog

from headwater.engines.engine import (
    AnswerStream,
    Emit,
    EngineBase,
    EngineError,
    EngineInfo,
    Finish,
    LoraAdapter,
    Pinned,
    Step,
    Transfer,
    Unusable,
    check_adapter,
    check_sleep,
    seal,
    unseal,
)
from headwater.engines.tensorrt_llm import HandoffMode
from headwater.engines.tensorrt_llm.polling import RankState
from headwater.engines.tensorrt_llm.sampling import prompt_logprobs, token_logprobs
from headwater.schemas import hashing
from headwater.schemas.inference import Choreography, GenerateRequest, TokenLogprob
from headwater.schemas.tables import Capability

CHOREOGRAPHIES: dict[HandoffMode, Choreography] = {
    "context-first": "returned",
    "generation-first": "room",
    "opaque": "opaque",
}

GLOBAL_ID_MIN = 1 << 40
"""Smaller ids are TensorRT-LLM's own, of requests within one engine."""


class HandoffParams(msgspec.Struct, frozen=True):
    """What a decode leg needs. On the way it is sealed to its prompt: TensorRT-LLM would continue any other from the same KV."""

    first_tokens: list[int] = []
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None


def new_request_id() -> int:
    """An id for both legs, unique in the fleet: 62 random bits, above TensorRT-LLM's own.

    Its own scheme gives each process a number of 6 bits on a node of 8, which a central place would have to assign.
    """
    return GLOBAL_ID_MIN | secrets.randbits(62)


def pack(request: GenerateRequest, disaggregated_params: Any) -> bytes:
    """The parameters that a finished prefill leg returned."""
    params = HandoffParams(
        list(disaggregated_params.first_gen_tokens or ()),
        disaggregated_params.ctx_request_id,
        disaggregated_params.opaque_state,
        disaggregated_params.draft_tokens,
        disaggregated_params.disagg_request_id,
        disaggregated_params.ctx_dp_rank,
        disaggregated_params.ctx_info_endpoint,
    )
    return seal(msgspec.msgpack.encode(params), request)


def pack_meeting(request: GenerateRequest, request_id: int, endpoint: str | None, rank: int) -> bytes:
    """The parameters of a prefill leg that has just started, for a decode leg that starts now as well."""
    params = HandoffParams(disagg_request_id=request_id, ctx_dp_rank=rank, ctx_info_endpoint=endpoint)
    return seal(msgspec.msgpack.encode(params), request)


def unpack(request: GenerateRequest, transfer: Transfer) -> HandoffParams:
    """The parameters for this decode leg. Raises `Unusable` if they are damaged, or another prompt's."""
    try:
        return msgspec.msgpack.decode(unseal(transfer.params, request), type=HandoffParams)
    except msgspec.DecodeError as error:
        raise Unusable(f"it cannot be read: {error}") from error


def for_prefill(api: Any, mode: HandoffMode, request_id: int) -> Any:
    """`DisaggregatedParams` of a prefill leg."""
    style = api.DisaggScheduleStyle
    return api.DisaggregatedParams(
        request_type="context_only",
        disagg_request_id=request_id,
        schedule_style=style.GENERATION_FIRST if mode == "generation-first" else style.CONTEXT_FIRST,
    )


def for_decode(api: Any, mode: HandoffMode, params: HandoffParams) -> Any:
    """`DisaggregatedParams` of a decode leg."""
    style = api.DisaggScheduleStyle
    return api.DisaggregatedParams(
        request_type="generation_only",
        first_gen_tokens=params.first_tokens or None,
        ctx_request_id=params.ctx_request_id,
        opaque_state=params.opaque_state,
        draft_tokens=params.draft_tokens,
        disagg_request_id=params.disagg_request_id,
        ctx_dp_rank=params.ctx_dp_rank,
        ctx_info_endpoint=params.ctx_info_endpoint,
        schedule_style=style.GENERATION_FIRST if mode == "generation-first" else style.CONTEXT_FIRST,
    )


TAGS: Final = ("kv_cache", "model_weights")
"""Memory that `sleep` releases: level 1 the KV cache, level 2 the weights as well."""

_log = structlog.get_logger("headwater.tensorrt_llm")


class TensorRtControl(EngineBase):
    """Base of `TensorRtEngine`: the optional part of the protocol."""

    name = "tensorrt_llm"
    packages = ("tensorrt-llm",)
    remark = (
        "written from its documented API and tested with a double of it; it has not run on hardware. "
        "Its wheels are for Python 3.10 and 3.12: use 3.12"
    )
    possible: ClassVar[frozenset[Capability]] = frozenset(
        {
            "generate",
            "images",
            "logprobs",
            "prompt_logprobs",
            "logit_bias",
            "allowed_tokens",
            "bad_words",
            "seed",
            "priority",
            "cache_salt",
            "guide",
            "processors",
            "lora",
            "handoff",
            "sleep",
            "kv_events",
            "kv_dump",
        }
    )
    # Until it is started; then set from its configuration and release.
    capabilities: frozenset[Capability] = frozenset()

    def __init__(self) -> None:
        self._api: Any = None
        self._llm: Any = None
        self._info = EngineInfo("", 1, 0, 1, 0)
        self._ranks: list[RankState] = []
        self._loras: dict[str, Any] = {}
        self._lora_ids = count(1)
        self._asleep = 0
        self._open = asyncio.Event()
        """Are requests started?"""
        self._open.set()

    async def load_lora(self, adapter: LoraAdapter) -> None:
        """See `Engine.load_lora`. TensorRT-LLM loads it with the first request that names it: the table is ours."""
        self._require("lora")
        if adapter.name in self._loras:
            return
        check_adapter(adapter, self._loras, self._info.lora_slots, self._info.lora_rank_max)
        # A number of its own each time: TensorRT-LLM caches weights by it, and has no call to unload them.
        self._loras[adapter.name] = self._api.LoRARequest(adapter.name, next(self._lora_ids), adapter.folder)

    async def unload_lora(self, name: str) -> None:
        """See `Engine.unload_lora`."""
        self._require("lora")
        self._loras.pop(name, None)

    async def sleep(self, level: int) -> None:
        """See `Engine.sleep`. Rolled back if a part of it fails."""
        self._require("sleep")
        check_sleep(level, asleep=bool(self._asleep), busy=self._busy())
        self._asleep = level
        self._open.clear()
        try:
            await self._collective("sleep", level)
        except Exception as error:
            await self._collective("wakeup", level)
            self._asleep = 0
            self._open.set()
            raise EngineError(f"TensorRT-LLM cannot sleep: {error}") from error
        for rank in self._ranks:
            rank.clear()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._require("sleep")
        await self._collective("wakeup", self._asleep)
        self._asleep = 0
        self._open.set()

    async def _collective(self, method: str, level: int) -> None:
        # In a thread: it waits for every rank.
        await asyncio.to_thread(self._llm._collective_rpc, method, (list(TAGS[:level]),))

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`. TensorRT-LLM has no call for it: the KV is freed after `kv_transfer_timeout_ms`.

        It looks for such KV only when the next prompt arrives (TensorRT-LLM 12313); the idle canary is one.
        """
        self._require("handoff")

    @abstractmethod
    def _busy(self) -> int:
        """Number of requests that it runs."""


# One request: its handle, the tokens sent so far, and how it ends.

FINISHES: Final[dict[str, Finish]] = {"stop": "stop", "length": "length", "cancelled": "abort"}

LEASE_SHARE: Final = 0.8
"""The lease's share of the time for which TensorRT-LLM keeps the KV: at a claim in the last moment it would be gone."""


class Leg(AnswerStream):
    """A whole request, or one leg of it. `sent` tokens were emitted; `late`: its KV did not come in time."""

    def __init__(self, request: GenerateRequest, emit: Emit, rank: int, transfer: Transfer | None) -> None:
        super().__init__(request, emit)
        self.request = request
        self.rank = rank
        self.transfer = transfer
        self.handle: Any = None
        self.task: asyncio.Task[None] | None = None
        self.sent = 0
        self.done = False
        self.late = False
        self._outputs = 0
        self._is_pinned = False
        self._stopping = False
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] = ()

    @property
    def scores_prompt(self) -> bool:
        """Are log probabilities of the prompt to be returned?"""
        return self.request.sampling.prompt_logprobs is not None and self.request.leg != "decode"

    async def score_prompt(self, result: Any) -> None:
        """Compute the prompt's log probabilities, with the first output that has its logits. Raises `EngineError`."""
        if not self.scores_prompt or self._outputs:
            return
        logits = result.context_logits
        if logits is None:
            raise EngineError("TensorRT-LLM returned no logits of the prompt")
        tokens: list[int] = hashing.unpack_tokens(self.request.tokens).tolist()
        count = self.request.sampling.prompt_logprobs or 0
        self._prompt_logprobs = await asyncio.to_thread(prompt_logprobs, tokens, logits, count)

    def blocks(self, size: int) -> int:
        """Blocks that it needs at least, once it runs."""
        return -(-(len(self.request.tokens) // 4 + self.sent) // size) if self.handle is not None else 0

    def pin(self, params: bytes, keep_s: float) -> None:
        """Announce the KV of a prefill leg that has just started."""
        self._is_pinned = True
        asyncio.get_running_loop().call_soon(self.send, Step((), pinned=Pinned(params, keep_s * LEASE_SHARE)))

    def abort(self) -> None:
        """End it now; TensorRT-LLM is to follow once that is safe."""
        self.send(Step((), "abort"))
        if self.handle is None:
            return
        self._stopping = True
        # Before its KV has come an abort would leave the transfer half done.
        if self.transfer is None or self._outputs:
            self.handle.abort()

    def fail(self, detail: str) -> None:
        """End it now with an error; TensorRT-LLM is to follow."""
        self.send(Step((), "error", detail=detail))
        self._stopping = True

    def take(self, result: Any, keep_s: float, *, as_opaque: bool) -> None:
        """One output: the tokens of a choice are cumulative. `done` once it is the last."""
        output = result.outputs[0]
        self._outputs += 1
        if self._stopping or self.late:
            self.handle.abort()
        reason = output.finish_reason
        self.done = bool(getattr(result, "finished", False) or reason)
        cached = getattr(result, "cached_tokens", None)
        # Of a decode leg it counts its own cache, and not what it fetched.
        cached_tokens = -1 if self.sent or cached is None or self.transfer is not None else int(cached)
        if self.is_prefill:
            if self.done:
                self.send(self._prefilled(output, keep_s, cached_tokens, as_opaque=as_opaque))
            return
        tokens = tuple(output.token_ids[self.sent :])
        count = self.request.sampling.logprobs
        logprobs = () if count is None else token_logprobs(tokens, output.logprobs[self.sent :], count)
        self.sent += len(tokens)
        step = Step(tokens, "", cached_tokens, logprobs, prompt_logprobs=self._prompt_logprobs)
        if tokens:
            self._prompt_logprobs = ()
        if self.done:
            self.send(_ended(step, reason))
        elif tokens:
            self.send(step)

    def _prefilled(self, output: Any, keep_s: float, cached: int, *, as_opaque: bool) -> Step:
        if output.finish_reason not in ("stop", "length"):
            return _ended(Step(()), output.finish_reason)
        pinned = None
        if not self._is_pinned and output.disaggregated_params is not None:
            first = tuple(output.disaggregated_params.first_gen_tokens or ()) if as_opaque else ()
            params = pack(self.request, output.disaggregated_params)
            pinned = Pinned(params, keep_s * LEASE_SHARE, first)
        return Step((), "length", cached, pinned=pinned, prompt_logprobs=self._prompt_logprobs)


def _ended(step: Step, reason: str | None) -> Step:
    if reason in FINISHES:
        return step._replace(finish=FINISHES[reason])
    return step._replace(finish="error", detail=f"TensorRT-LLM ended the request: {reason or 'no reason'}")
