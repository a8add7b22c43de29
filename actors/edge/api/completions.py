"""POST /v1/chat/completions and /v1/completions: from a body to prompts, sampling and a `CompletionCall`."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from headwater.actors.edge.api import openai_types
from headwater.actors.edge.api.completion_call import CompletionCall
from headwater.actors.edge.api.context import Call, Serving
from headwater.actors.edge.api.responses import Endpoint
from headwater.actors.edge.guided.logits_processors import processors_of
from headwater.actors.edge.model.catalog import Model
from headwater.actors.edge.model.chat_template import LiteralText
from headwater.actors.edge.request.routing_hints import parse_routing_headers
from headwater.actors.http.asgi import Disconnect
from headwater.actors.http.errors import ApiError, bad_request
from headwater.schemas.hashing import U32
from headwater.schemas.messages.inference import Guide, Sampling
from headwater.schemas.tables.capability import Capability, needs_of
from headwater.schemas.tables.card import ModelCard

DEFAULT_COMPLETION_TOKENS: Final = 16
"""What /v1/completions generates when the client sets no limit, as OpenAI does."""

PROMPTS_MAX: Final = 128

REPETITION_PENALTY_MAX: Final = 10.0
"""Engines take any positive number, but a value far from 1 destroys the distribution."""

NO_DEFAULTS: Final[Mapping[str, float]] = {}


class Completions:
    """The endpoints that generate."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def chat(self, call: Call) -> None:
        """POST /v1/chat/completions."""
        request = openai_types.decode_chat(call.body)
        self._serving.fields.check(request, request.logits_processors)
        model = self._serving.model(request.model, call.principal)
        _require_generation(model.card)
        if model.template is None:
            raise bad_request(f"{request.model} has no chat template; use /v1/completions.", param="model")
        _check_length(model, request, "messages")
        messages = request.plain_messages()
        literal = LiteralText(model.tokenizer)
        if not self._serving.special_tokens_in_text:
            literal.mark_spellings(messages)
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
        request = openai_types.decode_completion(call.body)
        self._serving.fields.check(request, request.logits_processors)
        model = self._serving.model(request.model, call.principal)
        _require_generation(model.card)
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
        request: openai_types.CompletionCommon,
        model: Model,
        prompts: list[U32],
        sampling: Sampling,
        guide_param: str,
        call: Call,
    ) -> None:
        serving = self._serving
        serving.require_open()
        hints = parse_routing_headers(
            call.headers, serving.limits, call.principal, user=request.user, priority=request.priority
        )
        name = ("chatcmpl-" if endpoint == "chat" else "cmpl-") + serving.workers.world.ids()
        choices = request.n or 1
        completion = CompletionCall(
            serving.workers,
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
            # A hint: engines without priorities ignore it.
            priority=(request.priority or 0) if "priority" in model.card.capabilities else 0,
            record=serving.record(name, model, endpoint, call.trace, answers=len(prompts) * choices),
            body=call.body,
            hints=hints,
            guide_param=guide_param,
        )
        client = Disconnect(call.receive)
        try:
            await completion.run(call.send, client)
        finally:
            client.stop()


def _sampling(
    request: openai_types.CompletionCommon,
    endpoint: Endpoint,
    model: Model,
    prompts: list[U32],
    limit: int | None,
    logprobs: int | None,
) -> tuple[Sampling, str]:
    """How to sample, checked against the model's capabilities, and the field that asks for guided decoding."""
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
    guided = request.guide()
    if not limit:
        limit = min(context - longest, int(card.default_sampling.get("max_tokens", context)))
    sampling = sampling_of(
        request,
        limit=limit,
        logprobs=logprobs,
        guide=guided[1] if guided else None,
        processors=processors_of(request.logits_processors, card.logits_processors),
        defaults=card.default_sampling,
    )
    guide_param = guided[0] if guided else ""
    # An engine without cache salts would share the prompt's blocks with other clients.
    for need in needs_of(sampling, cache_salt=request.cache_salt or ""):
        _require(card, need.capability, guide_param if need.capability == "guide" else need.param)
    if logprobs is not None and logprobs > card.logprobs_max:
        param = "top_logprobs" if endpoint == "chat" else "logprobs"
        raise bad_request(f"{param} must be from 0 to {card.logprobs_max} for this model.", param=param)
    vocabulary = card.vocabulary or model.tokenizer.vocabulary
    _check_tokens(sampling.stop_token_ids, vocabulary, "stop_token_ids")
    _check_tokens(sampling.logit_bias, vocabulary, "logit_bias")
    return sampling, guide_param


def _check_length(model: Model, given: str | list[int] | openai_types.ChatRequest, param: str) -> None:
    """Refuse what cannot fit the context before it is tokenized. Raises `ApiError` 400."""
    context = model.card.context_length
    if isinstance(given, list):
        if len(given) > context:
            raise _too_long(context, f"{len(given)} tokens", param)
        return
    texts = given.texts() if isinstance(given, openai_types.ChatRequest) else [given]
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
    """Tokens of a text, or a list of token ids checked against the vocabulary. Raises `ApiError` 400 naming `param`."""
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


def sampling_of(
    request: openai_types.CompletionCommon,
    *,
    limit: int,
    logprobs: int | None,
    guide: Guide | None = None,
    processors: dict[str, dict[str, Any]] | None = None,
    defaults: Mapping[str, float] = NO_DEFAULTS,
) -> Sampling:
    """How the engine samples for a request. `limit` is the number of tokens that may be generated.

    `defaults` are the model's own values of fields that the request leaves out. Raises `ApiError` 400.
    """

    def chosen(name: str, otherwise: float) -> float:
        value: float | None = getattr(request, name)
        return float(defaults.get(name, otherwise)) if value is None else value

    if request.top_p == 0:
        raise bad_request(
            "top_p must be above 0: temperature 0 always selects the most likely token.", param="top_p"
        )
    penalty = request.repetition_penalty
    if penalty is not None and not 0 < penalty <= REPETITION_PENALTY_MAX:
        raise bad_request(
            f"repetition_penalty must be above 0 and at most {REPETITION_PENALTY_MAX:g}.",
            param="repetition_penalty",
        )
    if request.min_tokens is not None and request.min_tokens > limit:
        raise bad_request(f"min_tokens must be from 0 to {limit}.", param="min_tokens")
    return Sampling(
        max_tokens=limit,
        temperature=chosen("temperature", 1.0),
        top_p=chosen("top_p", 1.0),
        top_k=max(0, int(chosen("top_k", 0))),
        min_p=chosen("min_p", 0.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=chosen("repetition_penalty", 1.0),
        seed=request.seed,
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=logprobs,
        logit_bias=request.bias(),
        guide=guide,
        processors=processors or {},
    )


def _require(card: ModelCard, capability: Capability, param: str) -> None:
    """Raises `ApiError` 400 naming the field and the capability that the engine lacks."""
    if capability not in card.capabilities:
        raise bad_request(
            f"{param} is not supported for {card.name}: its engine, {card.engine}, lacks capability {capability!r}.",
            param=param,
        )


def _require_generation(card: ModelCard) -> None:
    """Raises `ApiError` 400 for a model that only pools."""
    if "generate" not in card.capabilities:
        raise bad_request(f"{card.name} does not generate text; use /v1/embeddings.", param="model")
