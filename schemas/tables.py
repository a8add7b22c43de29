"""The records of the tables: model cards and LoRA cards, API keys, and leases."""

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from headwater.schemas.media import SEVERAL, PromptMediaKind

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
    kinds: Iterable[PromptMediaKind], capabilities: AbstractSet[Capability]
) -> tuple[PromptMediaKind, ...]:
    """The kinds that an encode worker with these capabilities encodes, of those that its model takes."""
    takes = set(kinds)
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
    needs: list[Need] = []
    if sampling is not None and (values := _sampled(sampling)) != _NONE_SAMPLED:
        needs += [need for need, value in zip(SAMPLING_NEEDS, values, strict=True) if value != need.unused]
    if fields:
        needs += [need for need in REQUEST_NEEDS if fields.get(need.field, need.unused) != need.unused]
    return needs


def required_capabilities(sampling: Any, **fields: Any) -> tuple[Capability, ...]:
    """Return what an engine must be capable of. Arguments as in `needs_of`."""
    return tuple([need.capability for need in needs_of(sampling, **fields)])


# Model cards and LoRA cards: what an edge needs to serve a model. One key per pool and per adapter.

LOGPROBS_MAX = 20
"""Alternatives per token that OpenAI's API permits."""


class ImageSupport(msgspec.Struct, frozen=True, kw_only=True):
    """How a model takes images: up to `per_prompt`, each as a run of tokens with the id `placeholder`.

    An image has `tokens` tokens of any size, or, if that is 0, one for each square of `side` pixels after it was resized to
    between `pixels_min` and `pixels_max` pixels: see `headwater.schemas.tables`.
    """

    placeholder: int
    per_prompt: int
    tokens: int = 0
    side: int = 0
    pixels_min: int = 0
    pixels_max: int = 0


class EmbeddingSupport(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes in place of an image: its embedding, `width` values of type `dtype` for each token.

    With `merge`, a token stands for a square of this many patches on each side, and the grid of patches comes with the embedding.
    """

    width: int
    dtype: Literal["float32", "float16", "bfloat16"]
    merge: int = 0


class VideoSupport(msgspec.Struct, frozen=True, kw_only=True):
    """How a model takes videos: up to `per_prompt`, each sampled to at most `frames` frames, as a run of tokens with the id `frame.placeholder`.

    Each `group` of frames that follow each other has as many tokens as an image of their size by the rule of `frame`; the last group may have fewer.
    """

    frame: ImageSupport
    per_prompt: int
    frames: int
    group: int = 1

    @property
    def placeholder(self) -> int:
        """The id of its tokens."""
        return self.frame.placeholder


class AudioSupport(msgspec.Struct, frozen=True, kw_only=True):
    """How a model hears audio within a conversation: up to `per_prompt` recordings of up to `samples_max` samples, `rate_hz` of them per second.

    One is a run of (samples + `offset`) // `stride` tokens with the id `placeholder`.
    """

    placeholder: int
    per_prompt: int
    rate_hz: int
    samples_max: int
    stride: int
    offset: int = 0


class MediaSupport(NamedTuple):
    """The kinds of media that a model takes in prompts, and how; None for those that it does not take."""

    images: ImageSupport | None = None
    videos: VideoSupport | None = None
    audio: AudioSupport | None = None

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities that an engine has for these kinds."""
        supports: dict[Capability, object] = {
            "images": self.images,
            "videos": self.videos,
            "audio": self.audio,
        }
        return frozenset([name for name, support in supports.items() if support is not None])

    @property
    def placeholders(self) -> dict[PromptMediaKind, int]:
        """The token id that stands for an item, by the kinds that the model takes."""
        return {kind: support.placeholder for kind, support in self._by_kind()}

    @property
    def limits(self) -> dict[PromptMediaKind, int]:
        """How many items a prompt may have, by kind."""
        return {kind: support.per_prompt for kind, support in self._by_kind()}

    def _by_kind(self) -> list[tuple[PromptMediaKind, ImageSupport | VideoSupport | AudioSupport]]:
        supports: list[tuple[PromptMediaKind, ImageSupport | VideoSupport | AudioSupport]] = []
        if self.images is not None:
            supports.append(("image", self.images))
        if self.videos is not None:
            supports.append(("video", self.videos))
        if self.audio is not None:
            supports.append(("audio", self.audio))
        return supports


class SpeechSupport(msgspec.Struct, frozen=True, kw_only=True):
    """How a model transcribes speech: up to `window_s` seconds of audio at `rate_hz` samples per second, with these token ids.

    A prompt is `previous` and what was said before, both optional; `start`; the token of the language and `transcribe` or
    `translate`, unless `languages` is empty (English only); and `no_timestamps`, or `first_timestamp`, which is 0 s. The ids after that
    one are times, `timestamp_s` seconds apart. `prompt_max`: tokens of what was said before.
    """

    window_s: float
    rate_hz: int
    start: int
    previous: int
    no_timestamps: int
    first_timestamp: int
    timestamp_s: float
    prompt_max: int
    languages: dict[str, int] = {}
    transcribe: int = 0
    translate: int = 0


class ImageGenerationSupport(msgspec.Struct, frozen=True, kw_only=True):
    """What images a model generates. Sizes in pixels: `width` × `height` unless a request says otherwise.

    Sides are multiples of `side_multiple`, between `side_min` and `side_max`. `steps` is the default number of denoising
    steps. A request may have up to `images_max` images of up to `steps_max` steps. It may change up to `inputs_max` images (0: none), and with
    `masks` a part of the first one.
    """

    width: int
    height: int
    side_multiple: int
    side_min: int
    side_max: int
    steps: int
    steps_max: int
    images_max: int
    inputs_max: int = 0
    masks: bool = False


class VideoGenerationSupport(msgspec.Struct, frozen=True, kw_only=True):
    """What videos a model generates. Sizes in pixels: `width` × `height`, and `frames` frames, unless a request says otherwise.

    Sides are multiples of `side_multiple`, between `side_min` and `side_max`, and a frame has up to `pixels_max` pixels. The
    number of frames is a multiple of `frames_multiple` plus one, up to `frames_max`; `fps` of them are shown per second.
    `steps` is the default number of denoising steps, `steps_max` the greatest.
    """

    width: int
    height: int
    side_multiple: int
    side_min: int
    side_max: int
    pixels_max: int
    fps: int
    frames: int
    frames_multiple: int
    frames_max: int
    steps: int
    steps_max: int


MIGRATIONS_MAX: Final = 5


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model. Stored as JSON, so that people can read it with the stock `nats` tool.

    `tokenizer`, `chat_template` and `response_template` are SHA-256 digests of artifacts in the object store: an edge
    shares no file system with the engines. `eos_token_ids` end an answer and are not part of its text.
    """

    name: str
    pool: str
    block_size: int
    context_length: int
    tokenizer: str
    chat_template: str
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    engine: str
    capabilities: tuple[str, ...]
    created_s: int
    aliases: tuple[str, ...] = ()
    """Other names that clients may use."""
    engine_version: str = ""
    total_blocks: int = 0
    """KV blocks of one worker."""
    max_running: int = 0
    """Requests that one worker runs at once."""
    tool_parser: str = ""
    """The format of tool calls; empty: answers are not searched for any."""
    reasoning_parser: str = ""
    """The format of reasoning; empty: none."""
    migrations_max: int = MIGRATIONS_MAX
    """How often a request may move to another worker: one that ends every worker is taken for the cause."""
    logits_processors: tuple[str, ...] = ()
    """Names that requests may use."""
    pooling_tasks: tuple[str, ...] = ()
    """Tasks of an embedding model: embed, classify, score, token_embed."""
    lora_slots: int = 0
    lora_rank_max: int = 0
    vocabulary: int = 0
    """Token ids in sampling parameters are below this; 0: below the tokenizer's size."""
    logprobs_max: int = LOGPROBS_MAX
    default_sampling: dict[str, float] = {}
    """The model's own defaults (its generation_config.json) for sampling fields that a request omits."""
    response_template: str = ""
    """Describes the formats, where a parser is `response_template`."""
    images: ImageSupport | None = None
    """None: the model takes no images."""
    image_embeddings: EmbeddingSupport | None = None
    """None: clients may send no embeddings of images."""
    videos: VideoSupport | None = None
    """None: the model takes no videos."""
    audio: AudioSupport | None = None
    """None: the model takes no audio in conversations."""
    speech: SpeechSupport | None = None
    """None: the model transcribes no speech."""
    image_generation: ImageGenerationSupport | None = None
    """None: the model generates no images."""
    video_generation: VideoGenerationSupport | None = None
    """None: the model generates no videos."""
    media_processor: str = ""
    """The digest of the settings with which media become the model's input, "" for a model without media. It is part of the ids of media."""
    media_tokens_max: dict[str, dict[PromptMediaKind, int]] = {}
    """The tokens that one item of media may have, by engine and kind; without a number only the context limits them."""
    identity: str = ""
    """The digest of the model's configuration, tokenizer and weights, "" where it is not known. All workers of the pool have the same."""
    dtype: str = ""
    """The type of its activations and KV in the engines of the pool, such as "bfloat16"; "" where they do not say."""
    engines: dict[str, tuple[str, ...]] = {}
    """The capabilities of each engine that has served the pool; `capabilities` are those of any of them."""

    @property
    def media(self) -> MediaSupport:
        """The media that its prompts may have."""
        return MediaSupport(self.images, self.videos, self.audio)

    def tokens_of_item_max(self, kind: PromptMediaKind) -> int | None:
        """The most tokens of one item that every engine of the pool takes, None if only the context limits them."""
        return min(
            (limits[kind] for limits in self.media_tokens_max.values() if kind in limits), default=None
        )


class LoraCard(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that is served as a model of its own, on top of the pool's base model. Stored as JSON.

    `source` is where any worker of the pool can load it from (a folder, file://, http(s)://, s3:// or hf://);
    `digest` is SHA-256 over its files, so that all workers serve the same weights.
    """

    name: str
    pool: str
    source: str
    digest: str
    rank: int
    created_s: int

    @property
    def identity(self) -> str:
        """The id that engines, workers and block hashes use: the name with a digest of the weights.

        An adapter that is deleted and published again with other weights has another identity, so that no cached
        block of the old one matches it.
        """
        return f"{self.name}@{self.digest[:12]}"


# The number of placeholder tokens that an item of media has in a prompt, from its shape.

RATIO_MAX: Final = 200
"""The largest ratio of an image's longer side to its shorter one: models that resize refuse narrower ones."""


def count_media_tokens(support: MediaSupport, kind: PromptMediaKind, shape: tuple[int, ...]) -> int:
    """Tokens of one item with a shape as in `PromptMedia`. Raises ValueError, with a message for people, if the model does not take it."""
    if kind == "image" and support.images is not None:
        return count_image_tokens(support.images, *shape[:2])
    if kind == "video" and support.videos is not None:
        return count_video_tokens(support.videos, *shape[:3])
    if kind == "audio" and support.audio is not None:
        return count_audio_tokens(support.audio, shape[0])
    raise ValueError(f"the model takes no {SEVERAL[kind]}")


def count_image_tokens(support: ImageSupport, height: int, width: int) -> int:
    """Tokens of one image. Raises ValueError, with a message for people, if the model does not take its shape.

    Models with a fixed count ignore the size. The others (Qwen2-VL and its successors) round both sides to multiples of `side`, keeping the
    area between `pixels_min` and `pixels_max`, and have one token per square. The rounding is Hugging Face's `smart_resize`.
    """
    if support.tokens:
        return support.tokens
    side = support.side
    if max(height, width) > RATIO_MAX * min(height, width):
        raise ValueError(
            f"an image of {width} x {height} pixels is too narrow: the ratio of its sides is at most {RATIO_MAX}"
        )
    # Python rounds halves to even, as the original does.
    rows, columns = round(height / side) * side, round(width / side) * side
    if rows * columns > support.pixels_max:
        shrink = math.sqrt(height * width / support.pixels_max)
        rows = max(side, math.floor(height / shrink / side) * side)
        columns = max(side, math.floor(width / shrink / side) * side)
    elif rows * columns < support.pixels_min:
        grow = math.sqrt(support.pixels_min / (height * width))
        rows = math.ceil(height * grow / side) * side
        columns = math.ceil(width * grow / side) * side
    return rows // side * (columns // side)


def count_video_tokens(support: VideoSupport, frames: int, height: int, width: int) -> int:
    """Tokens of one video: those of an image for each group of frames. Raises ValueError as `count_image_tokens` does, and for too many frames."""
    if frames > support.frames:
        raise ValueError(f"a video of {frames} frames is too long: at most {support.frames} are possible")
    return -(-frames // support.group) * count_image_tokens(support.frame, height, width)


def count_audio_tokens(support: AudioSupport, samples: int) -> int:
    """Tokens of one recording. Raises ValueError, with a message for people, for one that is too short or too long."""
    if samples > support.samples_max:
        raise ValueError(
            f"an audio clip of {samples / support.rate_hz:.3g} s is too long: at most {support.samples_max / support.rate_hz:g} s are possible"
        )
    tokens = (samples + support.offset) // support.stride
    if tokens < 1:
        shortest = (support.stride - support.offset) / support.rate_hz
        raise ValueError(
            f"an audio clip of {samples / support.rate_hz:.3g} s is too short: at least {shortest:.3g} s are necessary"
        )
    return tokens


# API keys: who a client is, what it may do and how much of it. The secret is not stored.

EVERY: Final = "*"
"""Stands in a list of models or endpoints for all of them, including future ones."""

Endpoint = Literal[
    "chat",
    "completions",
    "responses",
    "conversations",
    "messages",
    "embeddings",
    "classify",
    "score",
    "rerank",
    "audio",
    "images",
    "videos",
    "tokenize",
    "detokenize",
]
"""Endpoints that a key may be limited to, by the first segment of their path after the version."""

ENDPOINTS: Final[tuple[Endpoint, ...]] = get_args(Endpoint)

Permission = Literal["admin", "metrics", "tier", "worker", "toleration", "policy", "priority"]
"""What a key may do beyond calling models: administer, read metrics, override a decision of the router."""

PERMISSIONS: Final[dict[Permission, str]] = {
    "admin": "administer the edge",
    "metrics": "read /metrics",
    "tier": "choose the tier of workers (x-headwater-tier)",
    "worker": "choose the worker, its engine or revision (x-headwater-worker, x-headwater-engine, x-headwater-revision)",
    "toleration": "tolerate taints of workers (x-headwater-tolerates)",
    "policy": "choose the routing policy and its temperature (x-headwater-policy, x-headwater-router-temperature)",
    "priority": "choose the priority of requests (priority)",
}


class Scopes(msgspec.Struct, frozen=True):
    """What a credential permits. A name that is not listed is not permitted."""

    models: tuple[str, ...] = (EVERY,)
    endpoints: tuple[str, ...] = (EVERY,)
    permissions: tuple[str, ...] = ()
    """Each a `Permission`, or one of a later release, which this one ignores."""

    @classmethod
    def parse(cls, words: Iterable[str]) -> "Scopes":
        """The scopes that these words mean, the notation of tokens, errors and the command line. Others are ignored: they are other services'."""
        once = dict.fromkeys(words)
        return cls(
            tuple(word.removeprefix("models:") for word in once if word.startswith("models:")),
            tuple(word.removeprefix("endpoints:") for word in once if word.startswith("endpoints:")),
            tuple(word for word in once if word in PERMISSIONS),
        )

    def words(self) -> list[str]:
        """See `parse`."""
        models = [f"models:{name}" for name in self.models]
        return [*models, *(f"endpoints:{name}" for name in self.endpoints), *self.permissions]


class UsageLimits(msgspec.Struct, frozen=True):
    """How much of the fleet a credential may use. 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Tokens of prompts and outputs."""
    concurrent_requests: int = 0
    context_tokens: int = 0
    """Tokens of one prompt and its output."""


class SecretDigest(msgspec.Struct, frozen=True):
    """A digest of a key's secret, in hex. It is accepted until `until_s` (Unix time); 0: as long as the key."""

    digest: str
    until_s: int = 0


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One API key. Stored as JSON, so that people can read it with the stock `nats` tool.

    Times are in seconds of Unix time; `expires_s` 0: never. `digests` are several while a rotated secret is still
    accepted. `model_limits` are limits for one model, besides `limits` for all of the key's requests.
    """

    id: str
    name: str
    tenant: str
    digests: tuple[SecretDigest, ...]
    created_s: int
    expires_s: int = 0
    scopes: Scopes = Scopes()
    limits: UsageLimits = UsageLimits()
    model_limits: dict[str, UsageLimits] = {}
    cache_sharing: bool = False
    """True if its requests share cached prompts with other tenants, for system prompts that the operator publishes."""


# Leases: which actors are alive, and the epoch of each. One key per actor.

LeaseKind = Literal["worker", "router", "edge", "shadow"]

ServedPart = Literal["", "whole", "prefill", "decode", "encode"]
"""What a worker takes at present: nothing, whole requests (and legs), only legs of this kind, or media to encode."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Value of a lease. Stored as JSON, so that people can read it with the stock `nats` tool.

    `epoch` numbers the holder's incarnation. It does not change when the lease is renewed, nor when the holder reclaims a lapsed
    lease that is still free; 0 until the holder has determined it, before it serves anything. `incarnation` is unique to the
    holder. `stalled`: the log does not accept what the holder appends. `serves` is a worker's: nothing before it has joined its
    pool, and while it drains, is paused or sleeps. `reads_embeddings`: the worker takes media that an encode worker has encoded.
    `embedding_format` names what that one must compute, and of an encode worker what it computes: only with equal ones do they
    exchange embeddings. `encodes`: the kinds that an encode worker encodes. `revision`: what a worker runs (`WorkerJoined`).
    `endpoint` is a worker's: where a gateway reaches the edge beside it, "" if none does.
    """

    kind: str
    name: str
    pool: str = ""
    host: str = ""
    pid: int = 0
    epoch: int = 0
    incarnation: str = ""
    stalled: bool = False
    serves: ServedPart = ""
    reads_embeddings: bool = False
    embedding_format: str = ""
    encodes: tuple[PromptMediaKind, ...] = ("image",)
    revision: str = ""
    endpoint: str = ""

    def encodes_in(self, pool: str, kinds: AbstractSet[PromptMediaKind]) -> bool:
        """Does it encode media of these kinds for the workers of this pool now?"""
        return self.serves == "encode" and self.pool == pool and kinds <= set(self.encodes)
