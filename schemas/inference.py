"""Requests on their way to an engine and tokens on their way back. Core NATS, never the log."""

from typing import Any, Literal

import msgspec

from headwater.schemas.handoff import Handoff

Leg = Literal["", "prefill", "decode"]
"""Which part of a request a worker does: all of it, the prompt only, or what follows a prompt computed elsewhere."""

GuideKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


class Guide(msgspec.Struct, frozen=True, array_like=True):
    """What the answer must conform to. `value` is the schema or the choices as JSON, the regex, or the grammar."""

    kind: GuideKind
    value: str = ""


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
    guide: Guide | None = None
    processors: dict[str, dict[str, Any]] = {}
    """Logits processors by the name the engine was started with, each with its arguments."""


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True):
    """One prompt for one engine, as token ids (packed little-endian u32).

    `handle` is the edge's own short name of the stream; frames carry it instead of the request id.
    `emitted` tokens at the end of the prompt were generated elsewhere before a migration. For the decode leg
    `handoff` names where the prompt's KV is.
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
    leg: Leg = ""
    handoff: Handoff | None = None


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="ok"):
    """The engine has the request."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="no"):
    """The engine will not take it. `retryable`: another worker may. `spent`: its hand-off can not be used again.

    `param` is the field at fault, where the engine tells it.
    """

    reason: str
    retryable: bool
    spent: bool = False
    param: str = ""


GenerateReply = Accepted | Refused


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of the chosen token and of the likeliest ones: (token id, logprob) pairs."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class FrameEntry(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one stream.

    `position` counts the tokens this engine sent for it before these, so the edge sees a lost or
    repeated frame. `finish` is empty until the last entry: stop, length, abort, error (with `detail`), rejected (with
    `detail` and, where it is known, the request's field in `param`), or handoff at
    the end of a prefill leg, which sends no tokens: `handoff` is what it leaves, None if nothing was worth handing
    over. Where both legs run at the same time `handoff` comes before that end.
    `cached_tokens` is the engine's own count of prompt tokens it did not have to compute, -1: not told.
    """

    handle: int
    position: int
    tokens: tuple[int, ...]
    finish: str = ""
    cached_tokens: int = -1
    logprobs: tuple[TokenLogprob, ...] = ()
    detail: str = ""
    handoff: Handoff | None = None
    param: str = ""


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


class EmbedRequest(msgspec.Struct, frozen=True, array_like=True):
    """Prompts to pool into vectors. `task` is the engine's: embed, classify, score, token_embed.

    `dimensions` cuts vectors of models that were trained for it, 0: as they are. `segments`, where given, says for
    each prompt at which token the second text of a pair begins by the tokenizer's type ids, 0 where it has none.
    """

    request: str
    prompts: tuple[bytes, ...]
    task: str = "embed"
    lora_name: str = ""
    dimensions: int = 0
    segments: tuple[int, ...] = ()


class Embedded(msgspec.Struct, frozen=True, array_like=True, tag="vectors"):
    """One vector per prompt, packed little-endian float32."""

    vectors: tuple[bytes, ...]


EmbedReply = Embedded | Refused
