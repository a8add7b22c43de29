"""POST /tokenize and /detokenize, in vLLM's format; and the options of an edge's API."""

from typing import Annotated, Any

import msgspec

from headwater.actors.edge.apis.openai.translate import tools_of, turns_of
from headwater.actors.edge.apis.openai.types import (
    MESSAGES_MAX,
    TOOLS_MAX,
    ChatMessage,
    ChatTool,
    TokenId,
    refuse_template,
)
from headwater.actors.edge.prompt.messages import MediaPart, load_media, with_texts_of_files
from headwater.actors.edge.prompt.prompts import chat_prompt, text_prompts
from headwater.actors.edge.prompt.request import GenerationRequest, PromptOptions
from headwater.actors.edge.saga.context import Call, Serving
from headwater.actors.http.asgi import respond
from headwater.actors.http.decoding import decode_body
from headwater.actors.http.errors import bad_request
from headwater.actors.media.item import MediaItem

TOKENS_MAX = 1_000_000


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: of a text, or of a conversation as the model's chat template renders it."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    tools: Annotated[list[ChatTool], msgspec.Meta(max_length=TOOLS_MAX)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=TOKENS_MAX)]


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


class TokensApi:
    """The endpoints that count and translate tokens. No engine takes part."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, call: Call) -> None:
        """POST /tokenize."""
        request: TokenizeRequest = decode_body(_tokenize, call.body)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("Send one of prompt and messages.", param="prompt")
        model = self._serving.model(request.model, call.principal)
        call.quota.enter(model.card.name)
        context = call.quota.context(model.card.name, model.card.context_length)
        wanted = _wanted(request)
        if wanted.messages:
            plain = not self._serving.settings.allow_special_tokens_in_text
            known: dict[MediaPart, MediaItem] = {}
            intake = self._serving.intake_of(call.headers, call.principal)
            turns = await with_texts_of_files(wanted.messages, intake, known)
            wanted = msgspec.structs.replace(wanted, messages=turns)
            loaded = await load_media(wanted.messages, model, intake, known)
            chat = await chat_prompt(wanted, model, context, loaded, special_tokens_in_text=not plain)
            tokens = chat.tokens
        else:
            [tokens] = await text_prompts(wanted, model, context)
        document: dict[str, Any] = {"count": len(tokens), "max_model_len": context, "tokens": tokens.tolist()}
        document["token_strs"] = None
        if request.return_token_strs:
            document["token_strs"] = [model.tokenizer.text_of(token) for token in tokens.tolist()]
        await respond(call.send, 200, msgspec.json.encode(document), [])

    async def detokenize(self, call: Call) -> None:
        """POST /detokenize. Special tokens are spelled out."""
        request: DetokenizeRequest = decode_body(_detokenize, call.body)
        model = self._serving.model(request.model, call.principal)
        call.quota.enter(model.card.name)
        vocabulary = model.tokenizer.vocabulary
        outside = next((token for token in request.tokens if token >= vocabulary), None)
        if outside is not None:
            raise bad_request(
                f"Token id {outside} is outside the vocabulary of {vocabulary}.", param="tokens"
            )
        text = model.tokenizer.reference.decode(request.tokens, skip_special_tokens=False)
        await respond(call.send, 200, msgspec.json.encode({"prompt": text}), [])


def _wanted(request: TokenizeRequest) -> GenerationRequest:
    refuse_template(request.chat_template_kwargs)
    return GenerationRequest(
        model=request.model,
        param="prompt" if request.messages is None else "messages",
        messages=turns_of(request.messages or ()),
        prompts=(request.prompt,) if request.prompt is not None else (),
        tools=tools_of(request.tools or ()),
        prompt_options=PromptOptions(
            add_special_tokens=request.add_special_tokens,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final=bool(request.continue_final_message),
            variables=request.chat_template_kwargs or {},
        ),
    )
