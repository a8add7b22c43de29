"""Wire types of the OpenAI API that the edge accepts, and their validation.

An engine gets only the fields that are read here by name. Unknown fields are ignored, as OpenAI's servers do; reserved
fields are ignored and counted, and known but unsupported ones are refused when they would change the answer (`fields`).
"""

from typing import Annotated, Any, Literal, cast

import msgspec

from headwater.actors.edge.guided.structured_output import Guided
from headwater.actors.http.decoding import decode_body
from headwater.actors.http.errors import bad_request

Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=2.0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
TopK = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]
Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]

STOPS_MAX = 16
STOP_CHARACTERS_MAX = 256
TOKEN_DIGITS_MAX = 9
STOP_TOKENS_MAX = 128
BIASES_MAX = 1_024
MESSAGES_MAX = 8_192


class ContentPart(msgspec.Struct):
    """One part of a message's content. Only text is served so far."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One message, as the chat template gets it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class StreamOptions(msgspec.Struct):
    """`include_usage`: one more chunk with the usage at the end."""

    include_usage: bool = False


class CompletionCommon(Guided, kw_only=True):
    """Fields of both endpoints. Null is the same as leaving a field out, wherever OpenAI allows it."""

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
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: Count | None = None
    user: str | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    logits_processors: Any = None
    add_special_tokens: bool | None = None

    def stops(self) -> list[str]:
        """Stop strings, checked."""
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        if len(stops) > STOPS_MAX:
            raise bad_request(f"At most {STOPS_MAX} stop strings, got {len(stops)}.", param="stop")
        for stop in stops:
            if not stop or len(stop) > STOP_CHARACTERS_MAX:
                raise bad_request(
                    f"A stop string must have 1 to {STOP_CHARACTERS_MAX} characters.", param="stop"
                )
        return stops

    def bias(self) -> dict[int, float]:
        """Logit bias by token id, checked."""
        bias: dict[int, float] = {}
        if len(self.logit_bias or {}) > BIASES_MAX:
            raise bad_request(f"logit_bias has more than {BIASES_MAX} tokens.", param="logit_bias")
        for key, value in (self.logit_bias or {}).items():
            number = key.isascii() and key.isdigit() and len(key) <= TOKEN_DIGITS_MAX
            if not number or not -100 <= value <= 100:
                raise bad_request(
                    "logit_bias maps token ids to numbers from -100 to 100.", param="logit_bias"
                )
            bias[int(key)] = value
        return bias


class ChatRequest(CompletionCommon, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    echo: bool | None = None
    documents: Any = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def limit(self) -> int | None:
        """The maximum number of tokens that the client requests."""
        return self.max_completion_tokens or self.max_tokens

    def logprob_count(self) -> int | None:
        """Alternatives per token, None for no log probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_unsupported(self) -> None:
        """See `UnsupportedFields.refuse_unsupported`."""
        super().refuse_unsupported()
        for name in ("echo", "documents"):
            if getattr(self, name):
                raise bad_request(f"{name} is not supported by this release; leave it out.", param=name)
        if "chat_template" in (self.chat_template_kwargs or {}):
            raise bad_request(
                "chat_template cannot be set by a request; the operator sets it (--chat-template).",
                param="chat_template_kwargs.chat_template",
            )
        if self.tools and self.tool_choice != "none":
            raise bad_request("Tools are not supported by this release.", param="tools")


class CompletionRequest(CompletionCommon, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

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
        raise bad_request(
            "prompt is a string, a list of token ids, or a list of either; not empty.", param="prompt"
        )

    def refuse_unsupported(self) -> None:
        """See `ChatRequest.refuse_unsupported`."""
        super().refuse_unsupported()
        for name in ("suffix", "echo"):
            if getattr(self, name):
                raise bad_request(f"{name} is not supported by this release.", param=name)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("best_of other than n is not supported by this release.", param="best_of")


_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)


def decode_chat(body: bytes) -> ChatRequest:
    """Read and check a chat request. Raises `ApiError` 400 naming the field."""
    return cast(ChatRequest, decode_body(_chat, body))


def decode_completion(body: bytes) -> CompletionRequest:
    """Read and check a completion request. Raises `ApiError` 400 naming the field."""
    return cast(CompletionRequest, decode_body(_completion, body))
