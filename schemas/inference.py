"""Requests on their way to an engine and tokens on their way back. Core NATS, never the log."""

import msgspec


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How to pick tokens. Names and meanings are those of the OpenAI API and vLLM's SamplingParams."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logit_bias: dict[int, float] = {}


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True):
    """One prompt for one engine, as token ids (packed little-endian u32).

    `handle` is the edge's own short name of the stream; frames carry it instead of the request id.
    `emitted` tokens at the end of the prompt were generated elsewhere before a migration.
    """

    request: str
    edge: str
    handle: int
    tokens: bytes
    sampling: Sampling
    emitted: int = 0
    lora_name: str = ""
    cache_salt: str = ""
    priority: int = 0


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="ok"):
    """The engine has the request."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="no"):
    """The engine will not take it. `retryable`: another worker may."""

    reason: str
    retryable: bool


GenerateReply = Accepted | Refused


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of the chosen token and of the likeliest ones: (token id, logprob) pairs."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class FrameEntry(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one stream.

    `position` counts the tokens this engine sent for it before these, so the edge sees a lost or
    repeated frame. `finish` is empty until the last entry: stop, length, abort or error (with `detail`).
    `cached_tokens` is the engine's own count of prompt tokens it did not have to compute, -1: not told.
    """

    handle: int
    position: int
    tokens: tuple[int, ...]
    finish: str = ""
    cached_tokens: int = -1
    logprobs: tuple[TokenLogprob, ...] = ()
    detail: str = ""


class TokenFrame(msgspec.Struct, frozen=True, array_like=True):
    """All that one engine step has for one edge."""

    worker: str
    epoch: int
    entries: tuple[FrameEntry, ...]


class Cancel(msgspec.Struct, frozen=True, array_like=True):
    """Stop these requests; nobody reads their tokens any more."""

    requests: tuple[str, ...]


class StatusQuery(msgspec.Struct, frozen=True, array_like=True):
    """Is this request alive, and what came after the first `received` tokens?"""

    request: str
    received: int


class StatusReply(msgspec.Struct, frozen=True, array_like=True):
    """`known` is false for a request the engine never had or has forgotten; else `entry` catches up."""

    known: bool
    entry: FrameEntry | None = None
