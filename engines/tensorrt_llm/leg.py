"""One request in TensorRT-LLM: its handle, the tokens sent so far, and how it ends."""

import asyncio
from typing import Any, Final

from headwater.engines.engine import Emit, EngineError, Finish, Pinned, Step, Transfer
from headwater.engines.tensorrt_llm import handoff
from headwater.engines.tensorrt_llm.sampling import prompt_logprobs, token_logprobs
from headwater.schemas import hashing
from headwater.schemas.messages.inference import GenerateRequest, TokenLogprob

FINISHES: Final[dict[str, Finish]] = {"stop": "stop", "length": "length", "cancelled": "abort"}

LEASE_SHARE: Final = 0.8
"""Of the time that TensorRT-LLM keeps the KV: a claim on the last moment would find it gone."""


class Leg:
    """A whole request, or one leg of it. `sent` tokens were emitted; `late`: its KV did not come in time."""

    def __init__(self, request: GenerateRequest, emit: Emit, rank: int, transfer: Transfer | None) -> None:
        self.request = request
        self.rank = rank
        self.transfer = transfer
        self.handle: Any = None
        self.task: asyncio.Task[None] | None = None
        self.sent = 0
        self.ended = False
        self.done = False
        self.late = False
        self._emit = emit
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
        asyncio.get_running_loop().call_soon(
            self._emit, Step((), pinned=Pinned(params, keep_s * LEASE_SHARE))
        )

    def abort(self) -> None:
        """End it now; TensorRT-LLM is to follow once that is safe."""
        self.finish(Step((), "abort"))
        if self.handle is None:
            return
        self._stopping = True
        # Before its KV has come an abort would leave the transfer half done.
        if self.transfer is None or self._outputs:
            self.handle.abort()

    def fail(self, detail: str) -> None:
        """End it now with an error; TensorRT-LLM is to follow."""
        self.finish(Step((), "error", detail=detail))
        self._stopping = True

    def finish(self, step: Step) -> None:
        """Emit the last step, unless there was one."""
        if not self.ended:
            self.ended = True
            self._emit(step)

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
        known = -1 if self.sent or cached is None or self.transfer is not None else int(cached)
        if self.request.leg == "prefill":
            if self.done:
                self.finish(self._prefilled(output, keep_s, known, as_opaque=as_opaque))
            return
        tokens = tuple(output.token_ids[self.sent :])
        count = self.request.sampling.logprobs
        logprobs = () if count is None else token_logprobs(tokens, output.logprobs[self.sent :], count)
        self.sent += len(tokens)
        step = Step(tokens, "", known, logprobs, prompt_logprobs=self._prompt_logprobs)
        if tokens:
            self._prompt_logprobs = ()
        if self.done:
            self.finish(_ended(step, reason))
        elif tokens and not self.ended:
            self._emit(step)

    def _prefilled(self, output: Any, keep_s: float, cached: int, *, as_opaque: bool) -> Step:
        if output.finish_reason not in ("stop", "length"):
            return _ended(Step(()), output.finish_reason)
        pinned = None
        if not self._is_pinned and output.disaggregated_params is not None:
            first = tuple(output.disaggregated_params.first_gen_tokens or ()) if as_opaque else ()
            params = handoff.pack(self.request, output.disaggregated_params)
            pinned = Pinned(params, keep_s * LEASE_SHARE, first)
        return Step((), "length", cached, pinned=pinned, prompt_logprobs=self._prompt_logprobs)


def _ended(step: Step, reason: str | None) -> Step:
    if reason in FINISHES:
        return step._replace(finish=FINISHES[reason])
    return step._replace(finish="error", detail=f"TensorRT-LLM ended the request: {reason or 'no reason'}")
