"""Classifies vLLM's exceptions: invalid request, or engine failure.

vLLM (0.24 to 0.32) rejects a request in three places: when `SamplingParams` is made, in the first step of
`AsyncLLM.generate` (checked against model and tokenizer), and, for a grammar that does not compile, by the finish
reason "error". Only the first two raise an exception: `vllm.exceptions.VLLMClientError`, whose `parameter` is the
API's name of the field.
"""

from functools import cache
from typing import Any

from headwater.engines.engine import RequestRejected

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
