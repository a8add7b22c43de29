"""A conversation's prompt as vLLM renders it: its own request types, its own messages, its own way to a chat template.

Importing this module imports vLLM.
"""

import copy
import logging
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import tokenizers
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

from tests.templates.conversations import Conversation, Json

CONFIG: Final = SimpleNamespace(
    multimodal_config=None,
    enable_prompt_embeds=False,
    is_multimodal_model=False,
    revision=None,
    code_revision=None,
    tokenizer_revision=None,
    trust_remote_code=False,
    model="m",
    tokenizer="m",
    hf_config=SimpleNamespace(model_type="llama"),
)


class Refused(Exception):
    """vLLM has no prompt for it."""


class Asked(NamedTuple):
    """What vLLM makes of a client's body: its own request, messages of chats, and tools."""

    request: Any
    messages: list[Any]
    tools: list[Json] | None


def asked(given: Conversation, source: str | None) -> Asked:
    """A conversation as vLLM's endpoints read it. `source`: the model's template, None for a format made by code."""
    body: Json = copy.deepcopy({"model": "m", **given.body})
    request: Any
    if given.api == "responses":
        request = ResponsesRequest(**body)
        return Asked(request, *responses_messages(request, given.earlier))
    if given.api == "messages":
        request = AnthropicServingMessages.to_chat_completion_request(
            AnthropicMessagesRequest(max_tokens=16, **body),
            merge_inline_system=AnthropicServingMessages._detect_merge_inline_system(source),
        )
    else:
        request = ChatCompletionRequest(**body)
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    return Asked(request, list(request.messages), tools)


def small_tokenizer(special_tokens: dict[str, str]) -> PreTrainedTokenizerFast:
    logging.disable(logging.ERROR)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, **special_tokens)


class VllmTemplate:
    """One model's template, as vLLM uses it."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._tokenizer = small_tokenizer(special_tokens)
        self._source = source

    def render(self, given: Conversation) -> str:
        """The prompt. Raises `Refused`."""
        try:
            return self._rendered(given)
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {str(error)[:90]}".replace("\n", " ")) from error

    def _rendered(self, given: Conversation) -> str:
        request, messages, tools = asked(given, self._source)
        params = request.build_chat_params(self._source, "auto").with_defaults(
            {"tools": tools, "tokenize": False}
        )
        form = resolve_chat_template_content_format(
            self._source, tools, "auto", self._tokenizer, model_config=CONFIG
        )
        conversation, _, _ = parse_chat_messages(messages, CONFIG, content_format=form)
        return str(
            safe_apply_chat_template(
                CONFIG, self._tokenizer, conversation, **params.get_apply_chat_template_kwargs()
            )
        )


def responses_messages(request: Any, earlier: tuple[list[Json], list[Json]]) -> tuple[list[Any], Any]:
    """Messages and tools of a request of the Responses API, behind an earlier response's input and output."""
    sent, made = earlier
    before = construct_input_messages(request_input=[*sent]) if sent else None
    kinds = {"message": ResponseOutputMessage, "function_call": ResponseFunctionToolCall}
    messages = construct_input_messages(
        request_instructions=request.instructions,
        request_input=request.input,
        prev_msg=before,
        prev_response_output=[kinds[item["type"]](**item) for item in made] or None,
    )
    tools = construct_tool_dicts(
        request.tools, request.tool_choice, exclude_tools_when_tool_choice_none=False
    )
    return messages, tools
