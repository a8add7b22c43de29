"""POST /v1/chat/completions and /v1/completions: from a body to prompts, sampling and an `Exchange`."""

from collections.abc import Iterable

import numpy as np

from headwater.actors.edge import openai
from headwater.actors.edge.capabilities import require, require_generation
from headwater.actors.edge.errors import ApiError, bad_request
from headwater.actors.edge.exchange import Exchange
from headwater.actors.edge.http import Disconnect
from headwater.actors.edge.literal_text import LiteralText
from headwater.actors.edge.models import Model
from headwater.actors.edge.processors import processors_of
from headwater.actors.edge.record import RequestRecord
from headwater.actors.edge.render import Endpoint
from headwater.actors.edge.sampling import sampling_of
from headwater.actors.edge.serving import Call, Serving
from headwater.actors.edge.wishes import wishes_of
from headwater.schemas.hashing import U32
from headwater.schemas.inference import Sampling

DEFAULT_COMPLETION_TOKENS = 16
"""What /v1/completions generates when the client sets no limit, as OpenAI does."""

PROMPTS_MAX = 128


class Generation:
    """The endpoints that generate."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def chat(self, call: Call) -> None:
        """POST /v1/chat/completions."""
        request = openai.decode_chat(call.body)
        self._serving.check(request, request.logits_processors)
        model = self._serving.models.get(request.model)
        require_generation(model.card)
        if model.template is None:
            raise bad_request(f"{request.model} has no chat template: use /v1/completions.", param="model")
        _check_length(model, request, "messages")
        messages = request.plain_messages()
        literal = LiteralText(model.tokenizer)
        if not self._serving.special_tokens_in_text:
            literal.take_out(messages)
        text = model.template.render(
            messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            variables=request.chat_template_kwargs,
        )
        _check_length(model, text, "messages")
        prompt = await literal.encode(text, add_special_tokens=bool(request.add_special_tokens))
        sampling, guide = _sampling(
            request, "chat", model, [prompt], request.limit(), request.logprob_count()
        )
        await self._generate("chat", request, model, [prompt], sampling, guide, call)

    async def complete(self, call: Call) -> None:
        """POST /v1/completions."""
        request = openai.decode_completion(call.body)
        self._serving.check(request, request.logits_processors)
        model = self._serving.models.get(request.model)
        require_generation(model.card)
        entries = request.prompts()
        if len(entries) * (request.n or 1) > PROMPTS_MAX:
            raise bad_request(f"At most {PROMPTS_MAX} choices over all prompts.", param="prompt")
        special = request.add_special_tokens is not False
        for entry in entries:
            _check_length(model, entry, "prompt")
        prompts = [await tokens_of(model, entry, "prompt", special=special) for entry in entries]
        limit = request.max_tokens or DEFAULT_COMPLETION_TOKENS
        sampling, guide = _sampling(request, "completions", model, prompts, limit, request.logprobs)
        await self._generate("completions", request, model, prompts, sampling, guide, call)

    async def _generate(
        self,
        endpoint: Endpoint,
        request: openai.Common,
        model: Model,
        prompts: list[U32],
        sampling: Sampling,
        guide_param: str,
        call: Call,
    ) -> None:
        serving = self._serving
        serving.require_open()
        wishes = wishes_of(call.headers, serving.limits, user=request.user, priority=request.priority)
        name = ("chatcmpl-" if endpoint == "chat" else "cmpl-") + serving.fleet.world.ids()
        choices = request.n or 1
        exchange = Exchange(
            serving.fleet,
            model,
            endpoint,
            name,
            prompts=prompts,
            choices=choices,
            sampling=sampling,
            stops=request.stops(),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            stream=bool(request.stream),
            cache_salt=request.cache_salt or "",
            # A hint that OpenAI's own servers do not know: an engine without priorities serves in order.
            priority=(request.priority or 0) if "priority" in model.card.capabilities else 0,
            record=RequestRecord(serving.ledger, name, serving.payload, call.trace, len(prompts) * choices),
            body=call.body,
            wishes=wishes,
            guide_param=guide_param,
        )
        client = Disconnect(call.receive)
        try:
            await exchange.run(call.send, client)
        finally:
            client.stop()


def _sampling(
    request: openai.Common,
    endpoint: Endpoint,
    model: Model,
    prompts: list[U32],
    limit: int | None,
    logprobs: int | None,
) -> tuple[Sampling, str]:
    """What the engine is told, checked against what the model can do, and the field that asks for a guide."""
    longest = max(len(prompt) for prompt in prompts)
    if not all(len(prompt) for prompt in prompts):
        raise bad_request("The prompt has no tokens.", param="prompt")
    card = model.card
    context = card.context_length
    if longest + (limit or 1) > context:
        raise bad_request(
            f"This model's context is {context} tokens; the request has {longest} in the prompt"
            f" and asks for {limit or 1}.",
            param="messages" if endpoint == "chat" else "prompt",
            code="context_length_exceeded",
        )
    vocabulary = card.vocabulary or model.tokenizer.vocabulary
    _check_tokens(request.stop_token_ids or (), vocabulary, "stop_token_ids")
    if logprobs is not None:
        param = "top_logprobs" if endpoint == "chat" else "logprobs"
        require(card, "logprobs", "logprobs")
        if logprobs > card.logprobs_max:
            raise bad_request(f"{param} must be from 0 to {card.logprobs_max} here.", param=param)
    if request.logit_bias:
        require(card, "logit_bias", "logit_bias")
        _check_tokens(request.bias(), vocabulary, "logit_bias")
    if request.cache_salt:
        # Without it the prompt's blocks would be shared with everybody's.
        require(card, "cache_salt", "cache_salt")
    guided = request.guide()
    if guided is not None:
        require(card, "guide", guided[0])
    processors = processors_of(request.logits_processors, card.logits_processors)
    if processors:
        require(card, "processors", "logits_processors")
    if not limit:
        limit = min(context - longest, int(card.default_sampling.get("max_tokens", context)))
    sampling = sampling_of(
        request,
        limit=limit,
        logprobs=logprobs,
        guide=guided[1] if guided else None,
        processors=processors,
        defaults=card.default_sampling,
    )
    return sampling, guided[0] if guided else ""


def _check_length(model: Model, given: str | list[int] | openai.ChatRequest, param: str) -> None:
    """Refuse what can not fit the context before anything is made of it. Raises `ApiError` 400."""
    context = model.card.context_length
    if isinstance(given, list):
        if len(given) > context:
            raise _too_long(context, f"{len(given)} tokens", param)
        return
    texts = given.texts() if isinstance(given, openai.ChatRequest) else [given]
    size = sum(len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if size > context * model.tokenizer.token_bytes_max:
        raise _too_long(context, f"{size} bytes of text", param)


def _too_long(context: int, has: str, param: str) -> ApiError:
    return bad_request(
        f"This model's context is {context} tokens; the request has {has}.",
        param=param,
        code="context_length_exceeded",
    )


def _check_tokens(tokens: Iterable[int], vocabulary: int, param: str) -> None:
    for token in tokens:
        if token >= vocabulary:
            raise bad_request(
                f"{param}: token id {token} is outside the vocabulary of {vocabulary}.", param=param
            )


async def tokens_of(model: Model, entry: str | list[int], param: str, *, special: bool = True) -> U32:
    """The tokens of a text, or of a list that are the model's own. Raises `ApiError` 400 naming `param`."""
    if isinstance(entry, str):
        return await model.tokenizer.encode(entry, add_special_tokens=special)
    vocabulary = model.tokenizer.vocabulary
    try:
        tokens = np.array(entry, np.int64)
        outside = np.flatnonzero((tokens < 0) | (tokens >= vocabulary))
        bad = int(tokens[outside[0]]) if len(outside) else None
    except OverflowError:
        bad = next(token for token in entry if not 0 <= token < vocabulary)
    if bad is not None:
        raise bad_request(f"Token id {bad} is outside the vocabulary of {vocabulary}.", param=param)
    return tokens.astype(np.uint32)
