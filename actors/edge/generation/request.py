"""The internal form of a request to generate. Each API translates its own fields into it; nothing behind it knows an API.

OpenAI chat  ─┐
Completions  ─┤
Responses    ─┼─▶ GenerationRequest ─▶ prompts, sampling, parser ─▶ engines
Anthropic    ─┘
"""

from typing import Any, Final, Literal

import msgspec

from headwater.actors.edge.generation.messages.turn import MediaPart, TextPart, Turn
from headwater.actors.edge.generation.speech.recording import AudioRecording
from headwater.schemas.messages.inference import Guide

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
    """What a body says about routing; headers say more (`headwater.actors.edge.request.routing_hints`)."""

    user: str | None = None
    session: str | None = None
    """OpenAI's prompt_cache_key: requests with the same one should meet the same cache."""
    priority: int | None = None
    cache_salt: str = ""


class PromptOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How messages or texts become tokens.

    `truncate_tokens`: keep at most so many of the prompt's last tokens, None for all. `continue_final`: the answer
    continues the last message. `variables` are further ones for the chat template.
    """

    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final: bool = False
    truncate_tokens: int | None = None
    variables: dict[str, Any] = {}


DEFAULT_PROMPT_OPTIONS: Final = PromptOptions()
DEFAULT_SAMPLING: Final = SamplingFields()
DEFAULT_REASONING: Final = Reasoning()
DEFAULT_TOOL_CHOICE: Final = ToolChoice()
NO_HINTS: Final = Hints()


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
    tool_choice: ToolChoice = DEFAULT_TOOL_CHOICE
    reasoning: Reasoning = DEFAULT_REASONING
    prompt_options: PromptOptions = DEFAULT_PROMPT_OPTIONS
    sampling: SamplingFields = DEFAULT_SAMPLING
    max_tokens: int | None = None
    """At most; what the context has no room for after the prompt is not generated."""
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
    """To be transcribed: then there are neither messages nor prompts."""

    @property
    def is_guided(self) -> bool:
        """Does the whole answer conform to a guide: the client's, or that of a demanded call?"""
        return self.guide is not None or self.tool_choice.mode in ("required", "named")

    @property
    def has_media(self) -> bool:
        """Whether a message has more than text."""
        return any(isinstance(part, MediaPart) for turn in self.messages for part in turn.parts)

    @property
    def system(self) -> str | None:
        """The system prompt: the text of the first message, if that is one and has only text."""
        first = self.messages[0] if self.messages else None
        if first is None or first.role not in ("system", "developer"):
            return None
        return first.text() if all(isinstance(part, TextPart) for part in first.parts) else None
