"""What generation produces, whatever the API: typed events while it runs, and a result at its end.

For each choice, in order: any number of deltas, then one `ChoiceEnd`. `headwater.actors.edge.parsing.events` has the
deltas that parsers find in text: text, reasoning, tool calls.
"""

from typing import Literal, NamedTuple

from headwater.schemas.messages.inference import TokenLogprob

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


class FinishedCall(NamedTuple):
    """A tool call of the model. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class ChoiceResult(NamedTuple):
    """One whole choice."""

    number: int
    prompt_index: int
    text: str
    reasoning: str
    calls: tuple[FinishedCall, ...]
    end: ChoiceEnd
    detail: TokenDetail
    prompt: PromptDetail


class AudioPlace(NamedTuple):
    """Where in a recording a piece of it is."""

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
