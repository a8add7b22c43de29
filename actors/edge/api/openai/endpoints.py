"""POST /v1/chat/completions and /v1/completions."""

from headwater.actors.edge.api.openai.encoders import ChatEncoder, CompletionEncoder
from headwater.actors.edge.api.openai.translate import chat_request, completion_request, shown_of
from headwater.actors.edge.api.openai.types import decode_chat, decode_completion
from headwater.actors.edge.generation.generate import Generator
from headwater.actors.edge.request.context import Call, Serving


class OpenAiApi:
    """The endpoints that generate, in OpenAI's format."""

    def __init__(self, serving: Serving, generator: Generator) -> None:
        self._serving = serving
        self._generator = generator

    async def chat(self, call: Call) -> None:
        """POST /v1/chat/completions."""
        request = decode_chat(call.body)
        self._serving.fields.check(request, request.logits_processors)
        model = self._serving.model(request.model, call.principal)
        shown = shown_of(request, logprobs=bool(request.logprobs))
        await self._generator.run(chat_request(request), ChatEncoder(model.tokenizer, shown), call)

    async def complete(self, call: Call) -> None:
        """POST /v1/completions."""
        request = decode_completion(call.body)
        self._serving.fields.check(request, request.logits_processors)
        model = self._serving.model(request.model, call.principal)
        shown = shown_of(request, logprobs=request.logprobs is not None)
        await self._generator.run(
            completion_request(request), CompletionEncoder(model.tokenizer, shown), call
        )
