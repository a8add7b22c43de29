"""Conversion of sampling settings to vLLM's SamplingParams, of vLLM's log probabilities, and of its errors.

vLLM's `extra_args` (hand-off parameters, arguments of logits processors) are built only here: no name in it comes from a
client.

vLLM (0.24 to 0.32) rejects a request in three places: when `SamplingParams` is made, in the first step of
`AsyncLLM.generate` (checked against model and tokenizer), and, for a grammar that does not compile, by the finish
reason "error". Only the first two raise an exception: `vllm.exceptions.VLLMClientError`, whose `parameter` is the
API's name of the field.
"""

from functools import cache
from typing import Any, Final

from headwater.engines.engine import RequestRejected, decode_guide, guide_choices, guide_text
from headwater.schemas.inference import Guide, Sampling, TokenLogprob

PROCESSORS = "headwater.processors"
"""Key of `SamplingParams.extra_args` with the arguments of logits processors, by name."""

SEED_FOR_MINUS_ONE = 2**63 - 1

_TRANSFER = "kv_transfer_params"
_REPORT = "kv_cache_report_mode"


def answer(sampling: Sampling, *, fetch: dict[str, Any] | None = None, report_hits: bool = False) -> Any:
    """SamplingParams for an answer.

    `fetch` are the hand-off parameters of the prompt's KV (see `headwater.engines.vllm.handoff`); with `report_hits` the
    engine announces reused cached blocks again. Raises `RequestRejected` for an invalid guide.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    extra: dict[str, Any] = {}
    if sampling.processors:
        extra[PROCESSORS] = sampling.processors
    if fetch:
        extra[_TRANSFER] = fetch
    if report_hits:
        extra[_REPORT] = "full"
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        # For vLLM -1 means no seed.
        seed=SEED_FOR_MINUS_ONE if sampling.seed == -1 else sampling.seed,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        logit_bias=sampling.logit_bias or None,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        bad_words=list(sampling.bad_words) or None,
        structured_outputs=_structured(sampling.guide) if sampling.guide else None,
        extra_args=extra or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        # Older releases do not have it.
        **({} if sampling.thinking_budget is None else {"thinking_token_budget": sampling.thinking_budget}),
    )


def prefill(
    hand_over: dict[str, Any], *, prompt_logprobs: int | None = None, report_hits: bool = False
) -> Any:
    """SamplingParams for a prefill, whose one token is discarded, so without settings of the answer."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    extra: dict[str, Any] = {_TRANSFER: hand_over}
    if report_hits:
        extra[_REPORT] = "full"
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        prompt_logprobs=prompt_logprobs,
        extra_args=extra,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


# The layout of JSON answers. Left to the model, it may be white space without end, and an answer that is cut off in it is
# not valid: small models do that. `x-guidance` are options of vLLM's `guidance` backend inside a schema; others ignore it.
_LAYOUT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def _structured(guide: Guide) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    match guide.kind:
        case "json_object":
            return StructuredOutputsParams(json={"type": "object", "x-guidance": _LAYOUT})
        case "json_schema":
            schema: dict[str, Any] = decode_guide(guide, dict[str, Any])
            return StructuredOutputsParams(json={"x-guidance": _LAYOUT} | schema)
        case "choice":
            choices = guide_choices(guide)
            return StructuredOutputsParams(choice=choices)
        case "regex" | "grammar":
            return StructuredOutputsParams(**{guide.kind: guide_text(guide)})


def arguments(params: Any, name: str) -> dict[str, Any] | None:
    """Return the arguments in `params` for the processor `name`; for authors of logits processors.

    None if the request does not use it. See `VllmOptions.logits_processors`.
    """
    by_processor = (params.extra_args or {}).get(PROCESSORS, {})
    own_arguments: dict[str, Any] | None = by_processor.get(name)
    return own_arguments


def logprobs(output: Any, count: int) -> tuple[TokenLogprob, ...]:
    """Log probability of the chosen token and of the `count` likeliest; vLLM includes the chosen one in those."""
    if not output.logprobs:
        return ()
    return tuple(
        _token_logprob(token, entries, count)
        for token, entries in zip(output.token_ids, output.logprobs, strict=True)
    )


def prompt_logprobs(
    tokens: list[int], token_entries: Any, count: int | None
) -> tuple[TokenLogprob | None, ...]:
    """The same of a prompt's tokens; the first has none. Empty if the request did not ask for them."""
    if count is None or not token_entries:
        return ()
    return tuple(
        _token_logprob(token, entries, count) if entries else None
        for token, entries in zip(tokens, token_entries, strict=True)
    )


def _token_logprob(token: int, entries: Any, count: int) -> TokenLogprob:
    ranked = sorted(
        (item for item in entries.items() if item[1].rank and item[1].rank <= count),
        key=lambda item: (item[1].rank, item[0]),
    )
    return TokenLogprob(entries[token].logprob, tuple((number, entry.logprob) for number, entry in ranked))


# Classification of vLLM's exceptions: invalid request, or engine failure.

TEXT_MAX = 1_000
"""Characters of an error that are passed on: some contain the whole value."""


@cache
def _client_errors() -> tuple[type[Exception], ...]:
    import vllm.exceptions as known

    names = ("VLLMClientError", "VLLMValidationError", "LoRAAdapterNotFoundError")
    return tuple(getattr(known, name) for name in names if hasattr(known, name))


def rejection_of(error: BaseException) -> RequestRejected | None:
    """The rejection for an exception of vLLM; None where the engine failed, or may accept the request later."""
    if isinstance(error, RequestRejected):
        return error
    cause = error.__cause__
    if type(error).__name__ == "EngineGenerateError" and cause is not None:
        # It wraps any exception of `generate`; those raised by add_request concern the request.
        return _rejected(cause) if isinstance(cause, (*_client_errors(), ValueError, TypeError)) else None
    if isinstance(error, _client_errors()):
        return _rejected(error)
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        # Releases before VLLMClientError.
        return _rejected(error)
    return None


def _rejected(error: BaseException) -> RequestRejected:
    # Its `str` ends in the value, which may be as large as the request.
    text: Any = getattr(error, "message", "") or (error.args[0] if error.args else str(error))
    parameter = getattr(error, "parameter", None)
    return RequestRejected(
        (str(text) or type(error).__name__)[:TEXT_MAX], param=parameter if isinstance(parameter, str) else ""
    )
