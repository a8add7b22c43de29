"""POST /v1/chat/completions and /v1/completions."""

from headwater.actors.edge.answer.run import Generator
from headwater.actors.edge.apis.openai.encoder import (
    ChatEncoder,
    CompletionEncoder,
    shown_in_chat,
    shown_in_completion,
)
from headwater.actors.edge.apis.openai.translate import chat_request, completion_request
from headwater.actors.edge.apis.openai.types import decode_chat, decode_completion
from headwater.actors.edge.saga.context import Call, Serving


class OpenAiApi:
    """The endpoints that generate, in OpenAI's format."""

    def __init__(self, serving: Serving, generator: Generator) -> None:
        self._serving = serving
        self._generator = generator

    async def chat(self, call: Call) -> None:
        """POST /v1/chat/completions."""
        request = decode_chat(call.body)
        serving = self._serving
        serving.fields.check(request, request.logits_processors)
        model = serving.model(request.model, call.principal)
        encoder = ChatEncoder(model.tokenizer, shown_in_chat(request, serving.settings.reasoning_field))
        await self._generator.run(chat_request(request), encoder, call)

    async def complete(self, call: Call) -> None:
        """POST /v1/completions."""
        request = decode_completion(call.body)
        serving = self._serving
        serving.fields.check(request, request.logits_processors)
        model = serving.model(request.model, call.principal)
        encoder = CompletionEncoder(model.tokenizer, shown_in_completion(request))
        await self._generator.run(completion_request(request), encoder, call)
