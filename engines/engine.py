"""The `Engine` protocol, which states what a worker requires of an engine, and rules that all engines share.

One contract suite (tests/contract/engine) runs over every implementation. What an engine's `capabilities` lack is rejected by
name; `EngineBase` has none of the optional ones. Engines differ in how they load, sleep and pool, but not in what they refuse.

Parameters of a hand-off are bound to their prompt on their way from one engine to another, and checked for damage (`seal`, `unseal`).
Engines believe what they are given: vLLM reads whatever blocks are named, and an SGLang that enters a room with another
prompt answers with the other one's first token. So a prefill leg seals its parameters, and the decode leg opens them
only if they arrived unchanged, for the same tokens, LoRA adapter and salt.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from hashlib import blake2b
from typing import Any, ClassVar, Final, Literal, NamedTuple, NoReturn, Protocol, get_args

import msgspec

from headwater.schemas.events import BlocksCleared, BlocksRemoved, BlocksStored, KvGap
from headwater.schemas.inference import (
    FINAL,
    Choreography,
    EmbedRequest,
    GenerateRequest,
    Guide,
    ImageRequest,
    TokenLogprob,
    VideoRequest,
    prompt_digest,
)
from headwater.schemas.media import DType, PromptMedia, PromptMediaKind, media_features
from headwater.schemas.tables import (
    LOGPROBS_MAX,
    Capability,
    EmbeddingSupport,
    ImageGenerationSupport,
    MediaSupport,
    SpeechSupport,
    VideoGenerationSupport,
    required_capabilities,
)

Finish = Literal["", "stop", "length", "abort", "error", "died", "fatal", "rejected"]
"""abort: the request was aborted. error: the engine failed it, another may continue. died: the engine died while it ran. fatal: the engine died of it, as far as the
engine knows. rejected: no engine would accept it."""

FAILURES: Final[frozenset[str]] = frozenset({"error", "died", "fatal"})
"""Finishes after which another engine may continue."""

DEATHS: Final[frozenset[str]] = frozenset({"died", "fatal"})
"""Finishes that say that the engine is dead."""

FILE_CAPABILITIES: Final[frozenset[Capability]] = frozenset(
    {"image_generation", "image_edits", "video_generation"}
)
"""Those of engines that generate files."""

TOKEN_CAPABILITIES: Final[frozenset[Capability]] = frozenset(get_args(Capability)) - FILE_CAPABILITIES
"""Those of engines that read and generate tokens."""

DEFAULT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
"""Sampling fields for which a model may have defaults of its own."""

Aborts = Literal["anytime", "not while fetching", "never"]
"""When an engine can abort a request without harm: "not while fetching" is for those that leak the blocks of a decode leg aborted before its KV; it waits for its first token."""

PauseMode = Literal["abort", "wait", "keep"]
KvEvent = BlocksStored | BlocksRemoved | BlocksCleared | KvGap


class EngineError(Exception):
    """Base of what engines raise."""


class EngineUnavailable(EngineError):
    """The engine cannot be started here; the message says what to install or change."""


class EngineDied(EngineError):
    """The engine has died and its requests with it: the worker must end and be restarted."""


class EngineStartFailed(EngineError):
    """The engine did not start, but may the next time: memory, a device or a port was in use, or one of its processes died."""


_FINAL = (ValueError, TypeError, ImportError, FileNotFoundError, NotADirectoryError, PermissionError)


def start_failure(failure: str, error: BaseException, cause: str = "") -> EngineError:
    """Return what a start that raised `error` is to raise: `EngineUnavailable` if the next one would fail as well, else `EngineStartFailed`.

    `cause` is what a process of the engine wrote down before it died.
    """
    # Libraries raise an OSError without a number where a file of the model is missing.
    is_final = isinstance(error, _FINAL) or (type(error) is OSError and error.errno is None)
    text = f"{failure}: {cause or error or type(error).__name__}"
    return EngineUnavailable(text) if is_final and not cause else EngineStartFailed(text)


class RequestRejected(EngineError):
    """The engine rejects this request, and would again (too long, not supported).

    `param` is the API's name of the field at fault, if the engine names it.
    """

    retryable = False
    """May another worker accept it?"""

    def __init__(self, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class NotSupported(RequestRejected):
    """The engine lacks a capability; `capability` names it."""

    def __init__(self, engine: str, capability: Capability) -> None:
        super().__init__(f"{engine} does not support this: it has no capability {capability!r} here")
        self.capability = capability


class SplitOnly(RequestRejected):
    """The engine serves only the legs of split requests, and this is a whole one."""

    retryable = True

    def __init__(self, engine: str) -> None:
        super().__init__(f"{engine} serves only the legs of split requests here, and this one is whole")


class EngineInfo(NamedTuple):
    """What a started engine reports of itself. `total_blocks` of `block_size` tokens each.

    `pairs_with` identifies the engines that it can exchange KV with, by what must be equal (engine, version, model, dtype); "" if
    it cannot. `tasks` are the pooling tasks that it supports. `vocabulary` bounds token ids in sampling parameters, 0: by the
    tokenizer's size; `logprobs_max` bounds the alternatives per token. `default_sampling` are the model's own defaults for fields
    (`DEFAULT_FIELDS`) that a request omits. `media` says how it takes images, videos and audio in prompts, `speech` how it
    transcribes, the two of generation what it generates, `image_embeddings` which ones clients may send. `media_settings` are
    those beyond the model's files, as JSON, `media_tokens_max` the tokens that one item may have, by kind.
    """

    model: str
    block_size: int
    total_blocks: int
    max_running: int
    context_length: int
    version: str = ""
    pairs_with: str = ""
    lora_slots: int = 0
    lora_rank_max: int = 0
    tasks: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    vocabulary: int = 0
    logprobs_max: int = LOGPROBS_MAX
    default_sampling: Mapping[str, float] = {}
    media: MediaSupport = MediaSupport()
    speech: SpeechSupport | None = None
    image_generation: ImageGenerationSupport | None = None
    video_generation: VideoGenerationSupport | None = None
    image_embeddings: EmbeddingSupport | None = None
    media_settings: str = ""
    media_tokens_max: Mapping[PromptMediaKind, int] = {}
    dtype: str = ""


class Pinned(NamedTuple):
    """The KV of a prompt, kept for another engine for `lease_s` seconds unless released before.

    `params` is what the other engine needs to fetch it, opaque. `first_tokens` are those that the prefill
    generated, if the decode leg starts after them. `place` is the address (`host:port`) that the other engine has to reach, empty if
    the engine has none.
    """

    params: bytes
    lease_s: float
    first_tokens: tuple[int, ...] = ()
    place: str = ""


class Transfer(NamedTuple):
    """What a decode leg receives from the prefill leg: see `Pinned`."""

    params: bytes
    first_tokens: tuple[int, ...] = ()


class Step(NamedTuple):
    """New tokens of one request. The step with a `finish` is the last, and there is exactly one.

    `cached_tokens` is how many prompt tokens were cached; -1 if this step does not state it. A decode leg counts what it
    fetched, except in a room: its prefill leg has reported nothing yet, so it states that leg's count. `pinned` comes with the
    last step of a prefill leg (with the first if both legs run at once), None if the prompt has no KV worth a
    transfer. The tokens of a prefill leg are not part of any answer. `param` names the field that a request is
    rejected for, if the engine names it. `prompt_logprobs` come once, with the first tokens at the latest.
    """

    tokens: tuple[int, ...]
    finish: Finish = ""
    cached_tokens: int = -1
    logprobs: tuple[TokenLogprob, ...] = ()
    detail: str = ""
    pinned: Pinned | None = None
    param: str = ""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


class FileStep(NamedTuple):
    """A denoising step of image (or video) number `number`, or a file if there is `data`: it, or its `preview` with this number."""

    number: int
    steps_done: int
    data: bytes = b""
    preview: int = FINAL


class EngineLoad(NamedTuple):
    """Requests running and waiting; KV blocks in use and in total."""

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int


class EncodedImage(NamedTuple):
    """An image's embedding: `values` is a numpy array, bfloat16 as the uint16 of its bits; `fields` as in `ImageEmbedding`.

    `cached`: it was computed for another request.
    """

    values: Any
    dtype: DType
    fields: bytes = b""
    cached: bool = False


class LoraAdapter(NamedTuple):
    """A LoRA adapter on this machine: `folder` in PEFT's layout, `rank` as its configuration says."""

    name: str
    folder: str
    rank: int


Emit = Callable[[Step], None]
EmitFile = Callable[[FileStep], None]


class Engine(Protocol):
    """One engine instance. Every method is called from the event loop that called `start`.

    Those with a body here are optional: an engine without the capability rejects the call by its name.
    """

    name: str
    capabilities: frozenset[Capability]
    choreography: Choreography
    aborts: Aborts
    notices_fetches: bool

    async def start(self) -> EngineInfo:
        """Load the model and become ready. Raises `EngineUnavailable`."""
        ...

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """Start to generate. `emit` is called on the event loop for each step, never before this returns.

        `request.leg` "prefill" computes the prompt and pins its KV for another engine; "decode" fetches the KV with
        `transfer`, which is valid for one such call, and computes the prompt itself if there is none. Raises
        `RequestRejected` at once for a request that cannot succeed, and `EngineDied` if the engine is known to be dead.
        """
        ...

    def abort(self, request: str) -> None:
        """Stop a request soon: its last step has finish "abort". Unknown ids are ignored.

        Also before its first token, so that a client that has left delays no other; `aborts` states exceptions.
        """
        ...

    async def release(self, request: str, params: bytes) -> None:
        """Release KV pinned by the prefill leg `request`: no engine will fetch it, or one has. Again is fine."""
        raise NotSupported(self.name, "handoff")

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """One vector per prompt, packed little-endian float32. Raises `RequestRejected`."""
        raise NotSupported(self.name, "embed")

    async def encode(self, item: PromptMedia) -> EncodedImage:
        """The embedding of an image, whose pixels are in `item.data` if `holds_embedding` is false. Raises `RequestRejected`."""
        raise NotSupported(self.name, "encode")

    def holds_embedding(self, item: PromptMedia) -> bool:
        """Is the embedding of this image at hand? An engine that encodes has computed it, one that reads was given it."""
        return False

    async def put_embedding(self, item: PromptMedia, image: EncodedImage) -> None:
        """Take an embedding that another engine computed, for requests that follow soon. Raises `EngineError` without room for it."""
        raise NotSupported(self.name, "image_embeddings")

    async def generate_images(self, request: ImageRequest, emit: EmitFile) -> None:
        """Generate images, or change those of the request: `emit` is called on the event loop for each denoising step and for each file.

        Returns once the last image was emitted. Cancelling it stops the request at its next step. Raises `RequestRejected`.
        """
        raise NotSupported(self.name, "image_generation")

    async def generate_video(self, request: VideoRequest, emit: EmitFile) -> None:
        """Generate a video, as number 0: an mp4 file. See `generate_images`."""
        raise NotSupported(self.name, "video_generation")

    async def load_lora(self, adapter: LoraAdapter) -> None:
        """Load an adapter, for requests with its name as `lora_name`. Raises `EngineError`; then nothing is loaded."""
        raise NotSupported(self.name, "lora")

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter. Requests that use it must have ended."""
        raise NotSupported(self.name, "lora")

    async def sleep(self, level: int) -> None:
        """Release memory: level 1 keeps the weights in host memory, 2 discards them. No request may be running."""
        raise NotSupported(self.name, "sleep")

    async def wake(self) -> None:
        """Undo `sleep`."""
        raise NotSupported(self.name, "sleep")

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating: abort running requests, wait until they have ended, or keep them suspended."""
        raise NotSupported(self.name, "pause")

    async def resume(self) -> None:
        """Undo `pause`."""
        raise NotSupported(self.name, "pause")

    async def profile(self, *, on: bool) -> None:
        """Start or end a profile; the engine's own settings say where it is written."""
        raise NotSupported(self.name, "profile")

    def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """KV-cache events as they happen, with Headwater's sequence hashes. One reader."""
        ...

    def held_blocks(self) -> list[BlocksStored]:
        """All cached blocks, parents before children: `BlocksCleared` and these rebuild the index.

        Earlier events that `kv_events` has not yielded yet are dropped, as their result is included.
        """
        ...

    def load(self) -> EngineLoad:
        """Present load."""
        ...

    async def clear_kv(self) -> None:
        """Drop all cached blocks that no running request uses."""
        ...

    async def check(self) -> None:
        """Returns if the engine is alive. Raises `EngineDied`."""
        ...

    async def stop(self) -> None:
        """Stop the engine and all its processes."""
        ...


class EngineBase(Engine):
    """Base for engines, with what each has unless it says otherwise, and the checks that all make."""

    choreography: Choreography = "returned"
    aborts: Aborts = "anytime"
    notices_fetches: bool = True
    """Does the engine notice by itself that another one has fetched its KV? If not, its worker calls `release`."""
    possible: ClassVar[frozenset[Capability]] = frozenset()
    """Capabilities that an engine may have when it is started, by its configuration; those it always has may be missing."""
    packages: ClassVar[tuple[str, ...]] = ()
    """The distributions that it runs on, one of which must be installed; none: it needs no other."""
    remark: ClassVar[str] = ""
    """What users must know before they choose it; `headwater engines` shows it."""

    def _reject(self, capability: Capability) -> NoReturn:
        raise NotSupported(self.name, capability)

    def _require(self, capability: Capability) -> None:
        """Raises `NotSupported` if the engine lacks a capability."""
        if capability not in self.capabilities:
            self._reject(capability)

    def _check_supported(self, request: GenerateRequest) -> None:
        """Raises `NotSupported` for the first capability that a request requires and this engine lacks, or `SplitOnly`."""
        features = {
            "lora_name": request.lora_name,
            "leg": request.leg,
            "cache_salt": request.cache_salt,
            **media_features(request.media),
        }
        for capability in required_capabilities(request.sampling, **features):
            self._require(capability)
        if "split_only" in self.capabilities and not request.leg:
            raise SplitOnly(self.name)


def check_length(prompt: int, answer: int, context: int) -> None:
    """Raises `RequestRejected` for an empty prompt, and for one that does not fit into the context with its answer, all in tokens."""
    if not prompt:
        raise RequestRejected("the prompt is empty")
    if prompt + answer > context:
        raise RequestRejected(f"{prompt} prompt + {answer} new tokens exceed the context of {context}")


def check_processors(wanted: Collection[str], known: Collection[str]) -> None:
    """Raises `RequestRejected` for a logits processor that the engine was not started with."""
    for name in wanted:
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise RequestRejected(
                f"no logits processor {name!r} here; known are: {names}", param="logits_processors"
            )


# Rules of control calls that hold for every engine: LoRA slots and ranks, sleep, prompts to pool.


def check_adapter(
    adapter: LoraAdapter, loaded: Collection[str], slots: int, rank_max: int, setting: str = ""
) -> None:
    """Raises `EngineError` for an adapter of too large a rank, which the engine's `setting` bounds, or one more than there are slots."""
    if adapter.rank > rank_max:
        remedy = f": start it with a larger {setting}" if setting else ""
        raise EngineError(
            f"adapter {adapter.name!r} has rank {adapter.rank}, this engine supports up to {rank_max}{remedy}"
        )
    if adapter.name not in loaded and len(loaded) >= slots:
        raise EngineError(f"all {slots} LoRA slots are in use: {', '.join(sorted(loaded))}")


def check_loaded(name: str, loaded: Collection[str]) -> None:
    """Raises `RequestRejected` for a request that names an adapter which is not loaded; "" is the base model."""
    if name and name not in loaded:
        names = ", ".join(sorted(loaded)) or "none"
        raise RequestRejected(f"no LoRA adapter {name!r} is loaded here; loaded are: {names}", param="model")


def check_sleep(level: int, *, asleep: bool, busy: int) -> None:
    """Raises `EngineError` for an unknown level, an engine that sleeps, or one that runs requests."""
    if level not in (1, 2):
        raise EngineError(
            f"there is no sleep level {level}: 1 keeps the weights in host memory, 2 discards them"
        )
    if asleep:
        raise EngineError("it is already asleep")
    if busy:
        raise EngineError(f"{busy} requests are running: drain or abort them before it sleeps")


def check_text_only(request: EmbedRequest) -> None:
    """Raises `RequestRejected` for media in prompts to pool: such an engine would pool their places."""
    if any(request.media):
        raise RequestRejected("this engine pools text only", param="messages")


def check_pooling(info: EngineInfo, task: str, lengths: Collection[int]) -> None:
    """Raises `RequestRejected` for a task that the model does not have, or a prompt that it cannot take."""
    if task not in info.tasks:
        raise RequestRejected(f"{task!r} is not supported by this model; supported: {', '.join(info.tasks)}")
    for length in lengths:
        if not 0 < length <= info.context_length:
            raise RequestRejected(f"{length} tokens; 1 to {info.context_length} are possible")


# The steps of a request.


class AnswerStream:
    """Passes the steps of one request on, up to and including the final one, whose `finish` it has from then on.

    The tokens of a prefill leg are not part of any answer.
    """

    def __init__(self, request: GenerateRequest, emit: Emit) -> None:
        self.finish: Finish = ""
        self.is_prefill = request.leg == "prefill"
        self._emit = emit

    @property
    def ended(self) -> bool:
        """Was the final step sent?"""
        return bool(self.finish)

    def send(self, step: Step) -> None:
        """Emit one step; nothing after the final one."""
        if not self.ended:
            self.finish = step.finish
            self._emit(step._replace(tokens=(), logprobs=()) if self.is_prefill else step)


# Values of a request's guide, the structure that its answer must have, for the adapters.


def decode_guide(guide: Guide, kind: Any) -> Any:
    """The value of a guide in JSON, of type `kind`. Raises `RequestRejected`."""
    try:
        return msgspec.json.decode(guide.value.encode(), type=kind)
    except msgspec.DecodeError as error:
        raise RequestRejected(f"guide {guide.kind}: {error}") from error


def guide_choices(guide: Guide) -> list[str]:
    """The texts of a guide of kind `choice`. Raises `RequestRejected` if there are none."""
    choices: list[str] = decode_guide(guide, list[str])
    if not choices:
        raise RequestRejected("guide choice: give one or more texts to choose from")
    return choices


def guide_text(guide: Guide) -> str:
    """The text of a guide. Raises `RequestRejected` if it is empty."""
    if not guide.value:
        raise RequestRejected(f"guide {guide.kind}: it is empty")
    return guide.value


# Parameters of a hand-off, sealed to their prompt.

CHECKSUM_BYTES = 8
USED_MAX = 65_536


class Unusable(Exception):
    """The parameters of a hand-off cannot be used; the message says why."""


class UsedHandoffs:
    """The hand-offs that an engine has used, the latest `USED_MAX` of them: a second time their blocks may be another prompt's."""

    def __init__(self) -> None:
        self._used: OrderedDict[object, None] = OrderedDict()

    def use(self, name: object) -> None:
        """Note the use of the hand-off with this hashable name. Raises `Unusable` the second time."""
        if name in self._used:
            raise Unusable("it was already used")
        self._used[name] = None
        if len(self._used) > USED_MAX:
            self._used.popitem(last=False)


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    prompt: bytes
    params: bytes
    checksum: bytes


def seal(params: bytes, request: GenerateRequest) -> bytes:
    """The parameters of the prefill leg `request`, for the decode leg of the same prompt."""
    prompt = digest_of(request)
    return msgspec.msgpack.encode(_Sealed(prompt, params, _checksum(prompt, params)))


def unseal(sealed: bytes, request: GenerateRequest | None = None) -> bytes:
    """The parameters for the decode leg `request`, or, without a request, to release them. Raises `Unusable`."""
    try:
        unsealed = msgspec.msgpack.decode(sealed, type=_Sealed)
    except msgspec.DecodeError as error:
        raise Unusable(f"it is damaged: {error}") from error
    if unsealed.checksum != _checksum(unsealed.prompt, unsealed.params):
        raise Unusable("it is damaged: its checksum is wrong")
    if request is not None and unsealed.prompt != digest_of(request):
        raise Unusable("it is another prompt's")
    return unsealed.params


def digest_of(request: GenerateRequest) -> bytes:
    """Digest of the prompt of a request, with all that its KV depends on."""
    return prompt_digest(request.lora_name, request.cache_salt, request.tokens, request.media)


def _checksum(prompt: bytes, params: bytes) -> bytes:
    return blake2b(prompt + params, digest_size=CHECKSUM_BYTES).digest()
