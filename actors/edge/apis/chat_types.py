"""Wire types of chat completions and completions, and their validation.

An engine gets only the fields that are read here by name. Unknown fields are ignored, as OpenAI's servers do; reserved
fields are ignored and counted, and known but unsupported ones are refused when they would change the answer (`headwater.actors.edge.saga.fields`).
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec

from headwater.actors.edge.prompt.guides import FieldGuide, guide_of
from headwater.actors.edge.saga.fields import NOT_SUPPORTED, UnsupportedFields, rejected
from headwater.actors.http.errors import bad_field, bad_request

Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=2.0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
CountOrNone = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
TopK = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]
Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Logprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
BadWord = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
CacheKey = Annotated[str, msgspec.Meta(max_length=1024)]
ToolName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]

STOPS_MAX: Final = 16
STOP_CHARACTERS_MAX: Final = 256
TOKEN_DIGITS_MAX: Final = 9
STOP_TOKENS_MAX: Final = 128
BIASES_MAX: Final = 1_024
MESSAGES_MAX: Final = 8_192
TOOLS_MAX: Final = 512
BAD_WORDS_MAX: Final = 128
ALLOWED_TOKENS_MAX: Final = 16_384


class ContentPart(msgspec.Struct):
    """One part of a message's content: a text, or media by URL, as base64, or by the id of an upload."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    image_embeds: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None


class CalledFunction(msgspec.Struct):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str = ""


class MessageCall(msgspec.Struct):
    """A tool call of an earlier turn."""

    function: CalledFunction
    id: str = ""
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """One message. `reasoning_content` and `reasoning` are two names for what the model thought before its content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class ToolFunction(msgspec.Struct):
    """A function that the model may call. `parameters` is a JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct):
    """A tool; functions only."""

    function: ToolFunction | None = None
    type: str = "function"


class StreamOptions(msgspec.Struct):
    """`include_usage`: one more chunk with the usage at the end. `continuous_usage_stats`: a usage in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


GUIDED: Final = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""The fields for structured output."""

_guided_of: Final = attrgetter(*GUIDED)
_NOT_GUIDED: Final = (None,) * len(GUIDED)


class CompletionCommon(UnsupportedFields, kw_only=True):
    """Fields of both endpoints. Null is the same as leaving a field out, wherever OpenAI allows it."""

    IGNORED: ClassVar[Mapping[str, str]] = {
        "metadata": "answers are not stored",
        "store": "answers are not stored",
        "service_tier": "there is one tier; `priority` orders requests",
        "safety_identifier": "no abuse is reported",
        "prompt_cache_retention": "cached prompts stay until their space is needed",
    }

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=STOP_TOKENS_MAX)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=ALLOWED_TOKENS_MAX)] | None = None
    bad_words: Annotated[list[BadWord], msgspec.Meta(max_length=BAD_WORDS_MAX)] | None = None
    prompt_logprobs: Logprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    user: str | None = None
    prompt_cache_key: CacheKey | None = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None,
        rejected({}, part=".*", says=f"{NOT_SUPPORTED} Prompts are cached without it."),
    ] = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    logits_processors: Any = None
    add_special_tokens: bool | None = None

    def guide(self) -> FieldGuide | None:
        """The field that asks for structured output and its guide, None for unconstrained output. Raises `ApiError` 400."""
        values = _guided_of(self)
        # Most requests have none.
        return None if values == _NOT_GUIDED else guide_of(dict(zip(GUIDED, values, strict=True)))

    def stops(self) -> tuple[str, ...]:
        """Stop strings, checked."""
        return checked_stops([self.stop] if isinstance(self.stop, str) else self.stop, "stop string", "stop")

    def bias(self) -> dict[int, float]:
        """Logit bias by token id, checked."""
        bias: dict[int, float] = {}
        if len(self.logit_bias or {}) > BIASES_MAX:
            raise bad_field("logit_bias", f"has more than {BIASES_MAX} tokens.")
        for key, value in (self.logit_bias or {}).items():
            number = key.isascii() and key.isdigit() and len(key) <= TOKEN_DIGITS_MAX
            if not number or not -100 <= value <= 100:
                raise bad_field("logit_bias", "maps token ids to numbers from -100 to 100.")
            bias[int(key)] = value
        return bias


class Thinking(msgspec.Struct):
    """The switch for reasoning as DeepSeek, GLM and Kimi name it."""

    type: Literal["enabled", "disabled", "auto"]
    budget_tokens: Count | None = None


class ChatRequest(CompletionCommon, kw_only=True):
    """POST /v1/chat/completions."""

    IGNORED: ClassVar[Mapping[str, str]] = {
        **CompletionCommon.IGNORED,
        "verbosity": "a hint that open models do not know",
        "prediction": "a hint for speed",
    }

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[ChatTool], msgspec.Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, msgspec.Meta(max_length=32)] | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    include_reasoning: bool | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: Annotated[bool | None, rejected(False, says="{field} is for /v1/completions; leave it out.")] = None

    def logprob_count(self) -> int | None:
        """Alternatives per token, None for no log probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "needs logprobs to be true.")
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_unsupported(self) -> None:
        """See `UnsupportedFields.refuse_unsupported`."""
        super().refuse_unsupported()
        refuse_template(self.chat_template_kwargs)


def checked_stops(stops: list[str] | None, label: str, param: str) -> tuple[str, ...]:
    """Stop strings within their bounds. Raises `ApiError` 400."""
    if not stops:
        return ()
    if len(stops) > STOPS_MAX:
        raise bad_request(f"At most {STOPS_MAX} {label}s, got {len(stops)}.", param=param)
    if not all(stop and len(stop) <= STOP_CHARACTERS_MAX for stop in stops):
        raise bad_request(f"A {label} must have 1 to {STOP_CHARACTERS_MAX} characters.", param=param)
    return tuple(stops)


def refuse_template(variables: dict[str, Any] | None) -> None:
    """Raises `ApiError` 400 for `chat_template_kwargs` that would replace the chat template."""
    if "chat_template" in (variables or {}):
        raise bad_request(
            "chat_template cannot be set by a request; the operator sets it (--chat-template).",
            param="chat_template_kwargs.chat_template",
        )


class CompletionRequest(CompletionCommon, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    max_tokens: CountOrNone | None = None
    logprobs: Logprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Choices | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        for kind, wrap in ((int, True), (str, False), (list, False)):
            if prompt and set(map(type, prompt)) == {kind}:
                entries: list[Any] = [prompt] if wrap else list(prompt)
                if kind is not list or all(set(map(type, entry)) <= {int} for entry in entries):
                    return entries
        raise bad_field("prompt", "is a string, a list of token ids, or a list of either; not empty.")
