"""One generation, whatever the API: its request, its events, and its result.

OpenAI chat  ─┐
Completions  ─┤
Responses    ─┼─▶ GenerationRequest ─▶ prompts, sampling, parser ─▶ engines
Anthropic    ─┘

For each choice, in order: any number of deltas, then one `ChoiceEnd`. `headwater.actors.edge.parsing.grammar` has the
deltas that parsers find in text: text, reasoning, tool calls.
"""

import re
from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple

import msgspec

from headwater.actors.edge.parsing.grammar import ParsedCall
from headwater.actors.http.errors import bad_field
from headwater.actors.media.request import MediaSource
from headwater.schemas.inference import Guide, TokenLogprob

# Messages.

Role = Literal["system", "developer", "user", "assistant", "tool"]
MediaKind = Literal["image", "audio", "video", "embedding", "file"]


class TextPart(msgspec.Struct, frozen=True):
    """A piece of text in a message."""

    text: str


class MediaPart(msgspec.Struct, frozen=True):
    """An image, audio, video, the embedding of an image, or a file in a message, validated but not fetched.

    Either `url` (https: or data:), or base64 `data` with its `media_type`, or the `file_id` of an upload. `detail` is
    OpenAI's hint for images, `format` its name of the audio encoding, `name` the name of a file. `param` names the part
    in error messages.
    """

    kind: MediaKind
    param: str
    url: str = ""
    data: str = ""
    media_type: str = ""
    file_id: str = ""
    format: str = ""
    detail: str = ""
    name: str = ""

    def source(self) -> MediaSource:
        """Return what the media intake fetches. Raises `ApiError` 400 for an upload."""
        if self.file_id:
            raise bad_field(self.param, "names an upload, and this server has no files API.")
        if self.data:
            return MediaSource.from_base64(self.kind, self.data, self.param)
        return MediaSource.from_url(self.kind, self.url, self.param)

    def __hash__(self) -> int:
        """Hash the item by its place, which is unique within a request: hashing 27 MB of base64 would take the event loop 8 ms."""
        return hash((self.kind, self.param))


Part = TextPart | MediaPart

TEXT_SEPARATOR: Final = "\n"
"""The text between neighbouring parts of text: without it the last word of one and the first of the next would be one."""


def joined_texts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts of one message, with neighbouring texts as one."""
    joined: list[Part] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, TextPart):
            texts.append(part.text)
            continue
        if texts:
            joined.append(TextPart(TEXT_SEPARATOR.join(texts)))
            texts = []
        joined.append(part)
    if texts:
        joined.append(TextPart(TEXT_SEPARATOR.join(texts)))
    return tuple(joined)


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model made in an earlier turn. `arguments` is JSON text as the client sent it."""

    id: str
    name: str
    arguments: str


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation. `reasoning` is what the model thought before an assistant's content; `call_id` belongs to role tool."""

    role: Role
    parts: tuple[Part, ...] = ()
    name: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    reasoning: str = ""

    def text(self) -> str:
        """All text parts, joined."""
        return "".join([part.text for part in self.parts if isinstance(part, TextPart)])


# What else a request has.

ToolMode = Literal["auto", "none", "required", "named"]


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. `parameters` is a JSON schema; `strict`: arguments must conform to it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True):
    """auto: the model decides; required: at least one call; named: exactly the function `name`. `parallel`: several calls."""

    mode: ToolMode = "auto"
    name: str = ""
    parallel: bool = True


class Reasoning(msgspec.Struct, frozen=True):
    """What the client says about thinking; None leaves it to the model's template.

    `effort` is OpenAI's word (none, minimal, low, medium, high, xhigh, max), `enabled` the template's switch,
    `budget` the most tokens of thinking: a hint, unless `budget_param` names the field that demands it.
    """

    effort: str | None = None
    enabled: bool | None = None
    budget: int | None = None
    budget_param: str = ""


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling as requested, ranges already checked. None takes the model's default, then the engine's.

    `logprobs` counts the alternatives per token of the answer (0: the chosen one only), `prompt_logprobs` those of
    the prompt; None for no log probabilities.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    processors: Any = None
    """Logits processors by name with their arguments, as the client sent them."""


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """What a body says about routing; headers say more (`headwater.actors.edge.saga.http_call`)."""

    user: str | None = None
    session: str | None = None
    """OpenAI's prompt_cache_key: requests with the same one should meet the same cache."""
    priority: int | None = None
    cache_salt: str = ""


class PromptOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How messages or texts become tokens.

    `truncate_tokens`: keep at most this many of the prompt's last tokens, or with `truncate_end` of its first, None for all.
    `continue_final`: the answer continues the last message. `variables` are further ones for the chat template.
    """

    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final: bool = False
    truncate_tokens: int | None = None
    truncate_end: bool = False
    variables: dict[str, Any] = {}


NO_HINTS: Final = Hints()

OPENING_CHARACTERS: Final = 2_048


class AudioRecording(msgspec.Struct, frozen=True):
    """The bytes of an audio file, and what to do with it.

    `language` is an ISO 639-1 code, "" if the client did not say. `translates`: into English. `prompt` is text that precedes what is
    said. `timestamps`: the answer has tokens for the times of its segments.
    """

    data: bytes
    language: str = ""
    translates: bool = False
    prompt: str = ""
    timestamps: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, whichever API it came through. Has `messages` for chat, else `prompts` (texts or lists of token ids).

    `max_tokens` None: as many as the context allows. `choices` are returned of `best_of` generated per prompt.
    `guide` constrains the answer and `guide_param` names the field that asked for it. `param` names, in errors, the
    field that holds the prompt. `raw_answer`: no tool calls or reasoning are parsed.

    `endpoint` names the API in the request log and in metrics. `id_prefix` begins the request's name there, which
    ends with `id`, made if empty.
    """

    model: str
    param: str
    endpoint: str = "chat"
    id_prefix: str = ""
    id: str = ""
    messages: tuple[Turn, ...] = ()
    prompts: tuple[str | list[int], ...] = ()
    suffix: str = ""
    tools: tuple[Tool, ...] = ()
    omitted_tools: tuple[str, ...] = ()
    """Types of tools that the client offered and that nothing here runs."""
    tool_choice: ToolChoice = ToolChoice()
    reasoning: Reasoning = Reasoning()
    prompt_options: PromptOptions = PromptOptions()
    sampling: SamplingFields = SamplingFields()
    max_tokens: int | None = None
    """The most tokens to generate, further limited by the room that the context has after the prompt."""
    max_tokens_param: str = "max_tokens"
    logprobs_param: str = "logprobs"
    choices: int = 1
    best_of: int = 1
    stops: tuple[str, ...] = ()
    guide: Guide | None = None
    guide_param: str = ""
    stream: bool = False
    echo: bool = False
    return_token_ids: bool = False
    include_stop: bool = False
    """The stop string is part of the answer."""
    skip_special_tokens: bool = True
    raw_answer: bool = False
    hints: Hints = NO_HINTS
    recording: AudioRecording | None = None
    """The recording to transcribe; with one, there are neither messages nor prompts."""

    @property
    def is_guided(self) -> bool:
        """Does the whole answer conform to a guide: the client's, or that of a demanded call?"""
        return self.guide is not None or self.tool_choice.mode in ("required", "named")

    @property
    def has_media(self) -> bool:
        """Return whether a message has more than text."""
        return any(isinstance(part, MediaPart) for turn in self.messages for part in turn.parts)

    @property
    def opening(self) -> str:
        """How the conversation begins, up to the client's first message: equal for all its turns. "" without messages.

        Of long texts only the first and the last `OPENING_CHARACTERS`: it is to tell conversations apart, and cheap.
        """
        parts: list[str] = []
        for turn in self.messages:
            text = turn.text()
            parts += (turn.role, str(len(text)), text[:OPENING_CHARACTERS], text[-OPENING_CHARACTERS:])
            if turn.role == "user":
                break
        return " ".join(parts)

    @property
    def system(self) -> str | None:
        """The system prompt: the text of the first message, if that is one and has only text."""
        first = self.messages[0] if self.messages else None
        if first is None or first.role not in ("system", "developer"):
            return None
        return first.text() if all(isinstance(part, TextPart) for part in first.parts) else None


# Tools that an API's own servers would run. Nothing here runs them.

OPENAI: Final = re.compile(
    r"(web_search|file_search|code_interpreter|computer|image_generation|mcp|local_shell|shell|apply_patch|tool_search)"
    r"(_preview|_use|_use_preview)?(_\d{4}_\d{2}_\d{2})?\Z"
)
"""Types of tools of OpenAI's APIs."""

ANTHROPIC: Final = re.compile(
    r"(web_search|web_fetch|code_execution|computer|bash|text_editor|memory|tool_search_tool_(regex|bm25)|mcp_toolset|advisor)"
    r"(_\d{8})?\Z"
)
"""Types of tools of Anthropic's API."""


def hosted_name(tool: Any, types: re.Pattern[str]) -> str:
    """The type of a tool that is not served here; empty for any other, also for one of an unknown type."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return kind if isinstance(kind, str) and types.match(kind) else ""


# The events of generation, and its result.

FinishReason = Literal["stop", "length", "tool_calls"]


class TokenDetail(NamedTuple):
    """Tokens behind a delta, for clients that asked for ids or log probabilities (empty if those were not asked for)."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptDetail(NamedTuple):
    """The prompt, for clients that asked for it: its text (echo), token ids and log probabilities.

    The first token of a prompt has no log probability: its entry is None.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()


class TokenUsage(NamedTuple):
    """Token counts of a request, over all its choices.

    `cached_tokens` of the prompt were read from an engine's KV cache, `cache_write_tokens` were computed and stored
    there. `reasoning_tokens` are part of `completion_tokens`, `audio_tokens` of `prompt_tokens`. None: not disclosed to this client.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = 0
    cache_write_tokens: int | None = 0
    reasoning_tokens: int = 0
    audio_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


def written_tokens(prompt_tokens: int, cached_tokens: int, block_size: int) -> int:
    """Tokens of a prompt that its engine computed and stored as cache blocks; only full blocks are.

    The last block of a wholly cached prompt counts: an engine computes it again.
    `cached_tokens` below 0: the engine did not say, or has not yet.
    """
    if cached_tokens < 0:
        return 0
    return max(0, prompt_tokens // block_size * block_size - cached_tokens)


class GenerationStart(NamedTuple):
    """The first event. `id` is Headwater's id of the request, without an API's prefix; `created_s` since the epoch."""

    id: str
    model: str
    created_s: int
    usage: TokenUsage
    """The prompt's part is known."""


class ChoiceEnd(NamedTuple):
    """Why a choice ended. `stop` is the stop string that ended it, `stop_token` a token that did, if the client named it."""

    reason: FinishReason
    stop: str = ""
    stop_token: int | None = None


class ChoiceResult(NamedTuple):
    """One whole choice."""

    number: int
    prompt_index: int
    text: str
    reasoning: str
    calls: tuple[ParsedCall, ...]
    end: ChoiceEnd
    detail: TokenDetail
    prompt: PromptDetail


class AudioPlace(NamedTuple):
    """The position of a piece in a recording."""

    begin_s: float
    seconds: float


class GenerationResult(NamedTuple):
    """The whole answer. `places`: of the pieces of the recording that was transcribed, one for each choice; `language`: what is
    spoken in it, if it was detected.
    """

    start: GenerationStart
    choices: tuple[ChoiceResult, ...]
    usage: TokenUsage
    places: tuple[AudioPlace, ...] = ()
    language: str = ""
