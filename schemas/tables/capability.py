"""What an engine can do, and which capability each feature of a request needs. Workers publish theirs in model cards."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

from headwater.schemas.media_kind import PromptMediaKind

Capability = Literal[
    "generate",
    "images",
    "videos",
    "audio",
    "encode",
    "image_embeddings",
    "transcription",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "allowed_tokens",
    "bad_words",
    "thinking_budget",
    "seed",
    "priority",
    "cache_salt",
    "guide",
    "processors",
    "embed",
    "image_generation",
    "image_edits",
    "video_generation",
    "lora",
    "handoff",
    "split_only",
    "sleep",
    "pause",
    "profile",
    "kv_events",
    "kv_dump",
    "clear_kv",
]
"""What an engine offers; `split_only` is what it lacks: it computes the legs of split requests and no whole request. `encode`: it computes
embeddings of media for other engines; `image_embeddings`: it takes those instead of computing them. `images`, `videos` and `audio` are what
prompts may have; `transcription` is of recordings. `image_generation` is from text alone, `image_edits` are of images that came with it."""

ENCODE_NEEDS: Final[dict[PromptMediaKind, tuple[Capability, ...]]] = {
    "image": ("encode",),
    "video": ("encode", "videos"),
    "audio": ("encode", "audio"),
}
"""What encode workers must be capable of, by the kinds of media that may be encoded apart. A recording to transcribe is none of them."""


def kinds_encoded(
    taken: Iterable[PromptMediaKind], capabilities: AbstractSet[Capability]
) -> tuple[PromptMediaKind, ...]:
    """The kinds that an encode worker with these capabilities encodes, of those that its model takes."""
    takes = set(taken)
    return tuple(
        [kind for kind, needs in ENCODE_NEEDS.items() if kind in takes and set(needs) <= capabilities]
    )


class Need(NamedTuple):
    """A feature is used when `field` of `Sampling` or of a request is not `unused`. `param` is its API field."""

    field: str
    unused: Any
    capability: Capability
    param: str


SAMPLING_NEEDS: Final = (
    Need("logprobs", None, "logprobs", "logprobs"),
    Need("prompt_logprobs", None, "prompt_logprobs", "prompt_logprobs"),
    Need("logit_bias", {}, "logit_bias", "logit_bias"),
    Need("allowed_token_ids", (), "allowed_tokens", "allowed_token_ids"),
    Need("bad_words", (), "bad_words", "bad_words"),
    Need("thinking_budget", None, "thinking_budget", "thinking_token_budget"),
    Need("guide", None, "guide", "response_format"),
    Need("processors", {}, "processors", "logits_processors"),
)
REQUEST_NEEDS: Final = (
    Need("lora_name", "", "lora", "model"),
    Need("leg", "", "handoff", ""),
    Need("cache_salt", "", "cache_salt", "cache_salt"),
    Need("images", (), "images", "messages"),
    Need("videos", (), "videos", "messages"),
    Need("audio", (), "audio", "messages"),
    Need("recordings", (), "transcription", "file"),
    Need("given_embeddings", (), "image_embeddings", "messages"),
)
NEEDS: Final = SAMPLING_NEEDS + REQUEST_NEEDS
"""Features that not every engine has."""

_sampled: Final = attrgetter(*[need.field for need in SAMPLING_NEEDS])
_NONE_SAMPLED: Final = tuple([need.unused for need in SAMPLING_NEEDS])

HINTS: Final[frozenset[Capability]] = frozenset({"seed", "priority"})
"""Features that an engine without them ignores."""


def needs_of(sampling: Any, **fields: Any) -> list[Need]:
    """The features that a request uses: those of its `Sampling`, if it has one, and of further `fields` by name."""
    found: list[Need] = []
    if sampling is not None and (values := _sampled(sampling)) != _NONE_SAMPLED:
        found += [need for need, value in zip(SAMPLING_NEEDS, values, strict=True) if value != need.unused]
    if fields:
        found += [need for need in REQUEST_NEEDS if fields.get(need.field, need.unused) != need.unused]
    return found


def required_capabilities(sampling: Any, **fields: Any) -> tuple[Capability, ...]:
    """What an engine must be capable of. Arguments as in `needs_of`."""
    return tuple([need.capability for need in needs_of(sampling, **fields)])
