"""The HTTP surface: which path does what. A raw ASGI application; no framework, no middleware."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import prometheus_client
import structlog

from headwater.actors import metrics
from headwater.actors.edge import openai
from headwater.actors.edge.errors import ApiError, bad_request, overloaded
from headwater.actors.edge.exchange import Exchange
from headwater.actors.edge.fleet import Fleet
from headwater.actors.edge.http import (
    ClientGone,
    Disconnect,
    Headers,
    Receive,
    Scope,
    Send,
    read_body,
    respond,
)
from headwater.actors.edge.ledger import Ledger
from headwater.actors.edge.models import Model, Models
from headwater.actors.edge.record import RequestRecord
from headwater.schemas.hashing import U32, unpack_tokens
from headwater.schemas.request import PayloadKind

DEFAULT_COMPLETION_TOKENS = 16
"""What /v1/completions generates when the client sets no limit, as OpenAI does."""

PROMPTS_MAX = 128

_TRACEPARENT = re.compile(
    rb"(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    rb"(?P<more>-.*)?"
)

_log = structlog.get_logger("headwater.edge")


class Call(NamedTuple):
    """One POST: its body, the W3C trace it belongs to, and the way back."""

    body: bytes
    trace: str
    receive: Receive
    send: Send


class App:
    """The ASGI application of one edge."""

    def __init__(
        self,
        fleet: Fleet,
        models: Models,
        ledger: Ledger,
        draining: Callable[[], bool],
        payload: PayloadKind = "off",
    ) -> None:
        self._fleet = fleet
        self._models = models
        self._ledger = ledger
        self._payload: PayloadKind = payload
        self._draining = draining
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Errors become OpenAI error objects; nothing escapes."""
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        self.active += 1
        try:
            await self._route(path, method, scope, receive, send)
        except ApiError as error:
            metrics.HTTP_ERRORS.labels(str(error.status)).inc()
            await respond(send, error.status, error.body(), _retry_after(error))
        except ClientGone:
            metrics.HTTP_ERRORS.labels("499").inc()
        except Exception:
            _log.exception("request_failed", path=path)
            metrics.HTTP_ERRORS.labels("500").inc()
            failure = ApiError(500, "The edge failed; its log says why.", kind="server_error")
            await respond(send, 500, failure.body(), [])
        finally:
            self.active -= 1

    async def _route(self, path: str, method: str, scope: Scope, receive: Receive, send: Send) -> None:
        if path == "/v1/chat/completions":
            _only("POST", method)
            await self._chat(Call(await read_body(scope, receive), trace_of(scope), receive, send))
        elif path == "/v1/completions":
            _only("POST", method)
            await self._complete(Call(await read_body(scope, receive), trace_of(scope), receive, send))
        elif path == "/v1/models":
            _only("GET", method)
            await self._answer(send, {"object": "list", "data": [_card(m) for m in self._models.all()]})
        elif path.startswith("/v1/models/"):
            _only("GET", method)
            await self._answer(send, _card(self._models.get(path.removeprefix("/v1/models/"))))
        elif path == "/live":
            await self._answer(send, {"status": "live"})
        elif path == "/health":
            await self._health(send)
        elif path == "/metrics":
            body = prometheus_client.generate_latest()
            await respond(send, 200, body, [], b"text/plain; version=0.0.4; charset=utf-8")
        else:
            raise ApiError(404, f"There is nothing at {method} {path[:200]}.", code="not_found")

    async def _health(self, send: Send) -> None:
        workers = {card.name: self._fleet.workers(card.pool) for card in self._models.cards()}
        status = "draining" if self._draining() else "ok" if any(workers.values()) else "no workers"
        body = msgspec.json.encode({"status": status, "workers": workers})
        await respond(send, 200 if status == "ok" else 503, body, [])

    async def _answer(self, send: Send, document: Any) -> None:
        await respond(send, 200, msgspec.json.encode(document), [])

    async def _chat(self, call: Call) -> None:
        request = openai.decode_chat(call.body)
        request.refuse_unsupported()
        model = self._models.get(request.model)
        if model.template is None:
            raise bad_request(f"{request.model} has no chat template: use /v1/completions.", param="model")
        text = model.template.render(
            request.plain_messages(),
            add_generation_prompt=request.add_generation_prompt,
            variables=request.chat_template_kwargs,
        )
        prompt = await model.tokenizer.encode(text, add_special_tokens=False)
        await self._generate("chat", request, model, [prompt], request.limit(), request.logprob_count(), call)

    async def _complete(self, call: Call) -> None:
        request = openai.decode_completion(call.body)
        request.refuse_unsupported()
        model = self._models.get(request.model)
        entries = request.prompts()
        if len(entries) * (request.n or 1) > PROMPTS_MAX:
            raise bad_request(f"At most {PROMPTS_MAX} choices over all prompts.", param="prompt")
        prompts = [await _prompt(model, entry) for entry in entries]
        limit = request.max_tokens or DEFAULT_COMPLETION_TOKENS
        await self._generate("completions", request, model, prompts, limit, request.logprobs, call)

    async def _generate(
        self,
        endpoint: Any,
        request: openai.Common,
        model: Model,
        prompts: list[U32],
        limit: int | None,
        logprobs: int | None,
        call: Call,
    ) -> None:
        longest = max(len(prompt) for prompt in prompts)
        if not all(len(prompt) for prompt in prompts):
            raise bad_request("The prompt has no tokens.", param="prompt")
        context = model.card.context_length
        if longest + (limit or 1) > context:
            raise bad_request(
                f"This model's context is {context} tokens; the request has {longest} in the prompt"
                f" and asks for {limit or 1}.",
                param="messages" if endpoint == "chat" else "prompt",
                code="context_length_exceeded",
            )
        if logprobs is not None and "logprobs" not in model.card.capabilities:
            raise bad_request(f"{model.card.engine} gives no logprobs.", param="logprobs")
        if request.logit_bias and "logit_bias" not in model.card.capabilities:
            raise bad_request(f"{model.card.engine} takes no logit_bias.", param="logit_bias")
        if self._draining():
            raise ApiError(503, "This edge drains.", kind="server_error", retry_after_s=1.0)
        if not self._ledger.takes_requests:
            raise overloaded("The request log takes nothing more at the moment.", 1.0)
        name = ("chatcmpl-" if endpoint == "chat" else "cmpl-") + self._fleet.world.ids()
        choices = request.n or 1
        exchange = Exchange(
            self._fleet,
            model,
            endpoint,
            name,
            prompts=prompts,
            choices=choices,
            sampling=openai.sampling_of(request, limit=limit or context - longest, logprobs=logprobs),
            stops=request.stops(),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            stream=request.stream,
            cache_salt=request.cache_salt or "",
            priority=request.priority,
            record=RequestRecord(self._ledger, name, self._payload, call.trace, len(prompts) * choices),
            body=call.body,
        )
        client = Disconnect(call.receive)
        try:
            await exchange.run(call.send, client)
        finally:
            client.stop()


async def _prompt(model: Model, entry: str | list[int]) -> U32:
    if isinstance(entry, str):
        return await model.tokenizer.encode(entry, add_special_tokens=True)
    for token in entry:
        if not 0 <= token < model.tokenizer.vocabulary:
            raise bad_request(
                f"Token id {token} is outside the vocabulary of {model.tokenizer.vocabulary}.", param="prompt"
            )
    return unpack_tokens(b"".join(token.to_bytes(4, "little") for token in entry))


def _card(model: Model) -> dict[str, Any]:
    card = model.card
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "headwater",
        "max_model_len": card.context_length,
        "root": card.name,
        "parent": model.parent or None,
    }


def trace_of(scope: Scope) -> str:
    """Trace id of the `traceparent` header (W3C Trace Context), empty where there is none or it is malformed."""
    for name, value in scope["headers"]:
        if name == b"traceparent":
            parent = _TRACEPARENT.fullmatch(value)
            # Only later versions than this one may have more behind the flags.
            if parent is None or (parent["version"] == b"00" and parent["more"]):
                return ""
            return parent["trace"].decode()
    return ""


def _only(wanted: str, method: str) -> None:
    if method != wanted:
        raise ApiError(405, f"Use {wanted} here.", code="method_not_allowed")


def _retry_after(error: ApiError) -> Headers:
    if error.retry_after_s <= 0:
        return []
    return [(b"retry-after", b"%d" % max(1, round(error.retry_after_s)))]
