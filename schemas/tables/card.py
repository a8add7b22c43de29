"""Model cards and LoRA cards: what an edge needs to serve a model. KV bucket, one key per pool and per LoRA adapter."""

from typing import Final, Literal, NamedTuple

import msgspec

from headwater.schemas.media_kind import PromptMediaKind
from headwater.schemas.tables.capability import Capability

LOGPROBS_MAX = 20
"""Alternatives per token that OpenAI's API permits."""


class ImageSupport(msgspec.Struct, frozen=True, kw_only=True):
    """How a model takes images: up to `per_prompt`, each as a run of tokens with the id `placeholder`.

    An image has `tokens` tokens of any size, or, if that is 0, one for each square of `side` pixels after it was resized to
    between `pixels_min` and `pixels_max` pixels: see `headwater.schemas.tables.media_tokens`.
    """

    placeholder: int
    per_prompt: int
    tokens: int = 0
    side: int = 0
    pixels_min: int = 0
    pixels_max: int = 0


class EmbeddingSupport(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes in place of an image: its embedding, `width` values of type `dtype` for each token.

    With `merge`, a token stands for a square of so many patches on each side, and the grid of patches comes with the embedding.
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
        """Those that an engine has for these kinds."""
        found: dict[Capability, object] = {"images": self.images, "videos": self.videos, "audio": self.audio}
        return frozenset([name for name, support in found.items() if support is not None])

    @property
    def placeholders(self) -> dict[PromptMediaKind, int]:
        """The token id that stands for an item, by the kinds that the model takes."""
        return {kind: support.placeholder for kind, support in self._by_kind()}

    @property
    def limits(self) -> dict[PromptMediaKind, int]:
        """How many items a prompt may have, by kind."""
        return {kind: support.per_prompt for kind, support in self._by_kind()}

    def _by_kind(self) -> list[tuple[PromptMediaKind, ImageSupport | VideoSupport | AudioSupport]]:
        found: list[tuple[PromptMediaKind, ImageSupport | VideoSupport | AudioSupport]] = []
        if self.images is not None:
            found.append(("image", self.images))
        if self.videos is not None:
            found.append(("video", self.videos))
        if self.audio is not None:
            found.append(("audio", self.audio))
        return found


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
        return min((found[kind] for found in self.media_tokens_max.values() if kind in found), default=None)


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
