"""The chunks of one request, as SGLang streams them, as steps."""

from typing import Any, Final

from headwater.engines.engine import Emit, Finish, Step
from headwater.engines.sglang import sampling
from headwater.schemas.messages.inference import GenerateRequest, TokenLogprob

BAD_REQUEST: Final = 400
TEXT_MAX: Final = 1_000
"""Characters of an error that are passed on: some contain the whole value."""


class Stream:
    """Passes steps on, up to and including the final one. A prefill leg's tokens are discarded."""

    def __init__(self, request: GenerateRequest, rid: str, emit: Emit) -> None:
        self.request = request
        self.rid = rid
        self.ended = False
        self._emit = emit
        self._prefill = request.leg == "prefill"
        self._reported_cached = False
        self._reported_prompt = False
        # With `ignore_eos` SGLang ignores these as well.
        self._stops = frozenset(request.sampling.stop_token_ids if request.sampling.ignore_eos else ())

    def send(self, step: Step) -> None:
        """Emit one step, none after the final one."""
        if self.ended:
            return
        self.ended = bool(step.finish)
        self._emit(step._replace(tokens=(), logprobs=()) if self._prefill else step)

    def take(self, chunk: dict[str, Any]) -> None:
        """Emit the step of one chunk. Its token ids are those since the last chunk."""
        meta = chunk["meta_info"]
        finish, detail = finish_of(meta.get("finish_reason"))
        if finish not in ("", "stop", "length"):
            # What is ended from outside repeats its last token, and what is rejected has a token that means nothing.
            self.send(Step((), finish, detail=detail))
            return
        tokens = tuple(chunk["output_ids"])
        if not tokens and not finish and self._reported_cached:
            # A diffusion model returns most of its steps empty, and whole blocks at once.
            return
        at = next((place for place, token in enumerate(tokens) if token in self._stops), None)
        if at is not None:
            tokens, finish = tokens[: at + 1], "stop"
        wanted = self.request.sampling
        cached = -1
        if not self._reported_cached and "cached_tokens" in meta:
            self._reported_cached, cached = True, int(meta["cached_tokens"])
        chosen: tuple[TokenLogprob, ...] = ()
        if wanted.logprobs is not None:
            chosen = sampling.logprobs(
                meta.get("output_token_logprobs") or (),
                meta.get("output_top_logprobs") or (),
                wanted.logprobs,
            )
        prompt: tuple[TokenLogprob | None, ...] = ()
        if (
            wanted.prompt_logprobs is not None
            and not self._reported_prompt
            and meta.get("input_token_logprobs")
        ):
            self._reported_prompt = True
            prompt = sampling.prompt_logprobs(
                meta["input_token_logprobs"], meta.get("input_top_logprobs") or (), wanted.prompt_logprobs
            )
        self.send(Step(tokens, finish, cached, chosen[: len(tokens)], detail, None, "", prompt))


def finish_of(reason: dict[str, Any] | None) -> tuple[Finish, str]:
    """How a request ended, "" if it did not, and why.

    SGLang ends a request with "abort" for several causes: its status shows whether the request was at fault.
    """
    if not reason:
        return "", ""
    kind = reason.get("type")
    if kind in ("stop", "length"):
        return kind, ""
    detail = str(reason.get("message") or kind)[:TEXT_MAX]
    status = reason.get("status_code")
    if kind != "abort":
        return "error", detail
    if status is None:
        return "abort", ""
    return ("rejected" if int(status) == BAD_REQUEST else "error"), detail
