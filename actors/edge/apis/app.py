"""The HTTP routes of an edge. A raw ASGI application; no framework, no middleware."""

from typing import Any, Final, Protocol

import msgspec
import prometheus_client
import structlog

from headwater import __version__
from headwater.actors import metrics
from headwater.actors.edge.admit.account import holder_of
from headwater.actors.edge.admit.control import AccessControl, Principal, permitted_model, permitted_models
from headwater.actors.edge.admit.limiter import NO_QUOTA, RateLimiter, RequestQuota
from headwater.actors.edge.answer.run import Generator
from headwater.actors.edge.apis.anthropic import AnthropicApi, respond_error
from headwater.actors.edge.apis.audio import FORMS, AudioApi
from headwater.actors.edge.apis.chat import OpenAiApi, TokensApi
from headwater.actors.edge.apis.images import (
    IMAGE_EDITS,
    VARIATIONS,
    ImagesApi,
    variations_unsupported,
)
from headwater.actors.edge.apis.openapi import openapi_document
from headwater.actors.edge.apis.pooling import PoolingApi
from headwater.actors.edge.apis.responses_endpoints import ResponsesRoutes
from headwater.actors.edge.apis.video_jobs import VIDEO_BYTES_MAX
from headwater.actors.edge.apis.videos import VIDEOS, VideosApi, no_video
from headwater.actors.edge.catalog import Model, ModelCatalog
from headwater.actors.edge.history import OBJECT_BYTES_MAX, TenantObjects
from headwater.actors.edge.saga.fields import FieldChecker
from headwater.actors.edge.saga.http_call import (
    Call,
    DecisionSeal,
    Endpoint,
    Routes,
    Serving,
    internal_error,
    tenant_of,
    trace_of,
)
from headwater.actors.edge.saga.record import OpenRequests
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.edge.settings import UNLIMITED, EdgeSettings, HistorySettings
from headwater.actors.http.asgi import ClientGone, HeaderAdder, Headers, Receive, Scope, Send, respond
from headwater.actors.http.body import Bodies, check_shape, require_method
from headwater.actors.http.connection import WebSocket, refuse
from headwater.actors.http.errors import ApiError
from headwater.actors.limits import BodyLimits
from headwater.actors.media.intake import MediaIntake
from headwater.actors.runtime.ports import Persistence, Ports
from headwater.actors.runtime.tables import Requests

DEFAULTS: Final = EdgeSettings(request_timeout_s=0.0)
"""Without a time limit of requests, which an operator has."""

UNLIKE_JSON: Final = FORMS | {VIDEOS, IMAGE_EDITS}
"""Paths whose bodies may have another form than JSON."""

PROBES: Final = ("/live", "/health", "/metrics")


class Drainable(Protocol):
    """The owner of an application."""

    @property
    def stopping(self) -> bool:
        """True while the process drains: no new clients should be sent to it."""
        ...


class App:
    """The ASGI application of one edge."""

    def __init__(
        self,
        workers: WorkerRegistry,
        models: ModelCatalog,
        ledger: OpenRequests,
        owner: Drainable,
        settings: EdgeSettings = DEFAULTS,
        *,
        bodies: BodyLimits | None = None,
        probes: bool = True,
        persistence: Persistence | None = None,
        access: AccessControl | None = None,
        limiter: RateLimiter | None = None,
        intake: MediaIntake | None = None,
        requests: Requests | None = None,
    ) -> None:
        self._requests = requests or Requests()
        self._workers = workers
        self.bodies = Bodies(bodies)
        self._models = models
        models.is_live = lambda pool: workers.workers(pool) > 0
        workers.on_pools_changed = models.refresh
        self._persistence = persistence
        self._access = access or AccessControl()
        self._owner = owner
        self._rates = settings.limit
        # Not `or`: an empty limiter, as every one is at first, counts as false.
        self._limiter = RateLimiter(workers.ports.clock) if limiter is None else limiter
        self._probes = probes
        self._seal = DecisionSeal(workers.ports.secrets, workers.ports.clock)
        serving = Serving(workers, models, ledger, FieldChecker(), settings, self._access.salts, intake)
        generator = Generator(serving)
        history = settings.history
        self._responses = ResponsesRoutes(serving, generator, history)
        videos = _objects(workers.ports, history, settings.videos.ttl_s, VIDEO_BYTES_MAX)
        self.videos = VideosApi(serving, videos, settings.videos)
        images = ImagesApi(serving, _objects(workers.ports, history, history.image_ttl_s))
        self._routes = Routes(
            {
                **{path: {"POST": endpoint} for path, endpoint in _posts(serving, generator).items()},
                **self._responses.paths,
                **images.paths,
                **self.videos.paths,
            }
        )
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Errors become error objects of the path's API; no exception propagates."""
        if scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        self.active += 1
        self._requests.total += 1
        try:
            await self._route(path, method, scope, receive, send)
        except ApiError as error:
            await self._refuse(send, path, error)
        except ClientGone:
            metrics.HTTP_ERRORS.labels("499").inc()
        except Exception as error:
            await self._refuse(send, path, internal_error(path, error))
        finally:
            self.active -= 1

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket until it closes, or refuse its handshake with an HTTP error."""
        self.active += 1
        try:
            principal = await self._access.admit(scope)
            if scope["path"] != "/v1/responses":
                raise ApiError(404, f"Unknown route: {scope['path'][:200]}.", code="not_found")
            socket = WebSocket(receive, send)
            await socket.accept([])
            call = Call(b"", trace_of(scope), receive, send, scope["headers"], principal)

            async def admit() -> tuple[Principal, RequestQuota]:
                sender = await self._access.admit(scope)
                return sender, self._quota(sender, scope["headers"])

            await self._responses.socket.serve(socket, call, admit)
        except ApiError as error:
            metrics.HTTP_ERRORS.labels(str(error.status)).inc()
            await refuse(send, error)
        except Exception as error:
            internal_error(scope["path"], error)
            metrics.HTTP_ERRORS.labels("500").inc()
        finally:
            self.active -= 1

    async def _route(self, path: str, method: str, scope: Scope, receive: Receive, send: Send) -> None:
        principal = await self._access.admit(scope)
        endpoint = self._routes.find(method, path)
        if endpoint is not None:
            await self._call(endpoint, principal, scope, receive, send)
        elif path.startswith(f"{VIDEOS}/"):
            raise no_video(path)
        elif path == VARIATIONS:
            raise variations_unsupported()
        elif path == "/version":
            require_method("GET", method)
            await self._answer(send, {"version": __version__})
        elif path == "/openapi.json":
            require_method("GET", method)
            await self._answer(send, openapi_document())
        elif path == "/v1/models":
            require_method("GET", method)
            models = [
                model
                for model in permitted_models(self._models, principal)
                if self._workers.is_routable(model.card.pool)
            ]
            await self._answer(send, {"object": "list", "data": [model_entry(model) for model in models]})
        elif path.startswith("/v1/models/"):
            require_method("GET", method)
            model = permitted_model(self._models, principal, path.removeprefix("/v1/models/"))
            await self._answer(send, model_entry(model))
        elif path == "/" and method in ("HEAD", "GET"):
            # Claude Code asks so whether the server is there.
            await self._answer(send, {"status": "live"})
        elif not self._probes and path in PROBES:
            raise ApiError(404, f"{path} is served on the metrics port only.", code="not_found")
        elif path == "/live":
            await self._answer(send, {"status": "live"})
        elif path == "/health":
            healthy, document = self.health()
            await respond(send, 200 if healthy else 503, msgspec.json.encode(document), [])
        elif path == "/metrics":
            body = prometheus_client.generate_latest()
            await respond(send, 200, body, [], b"text/plain; version=0.0.4; charset=utf-8")
        else:
            raise ApiError(404, f"Unknown route: {method} {path[:200]}.", code="not_found")

    async def _call(
        self, endpoint: Endpoint, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        trace = trace_of(scope)
        if trace.trace:
            structlog.contextvars.bind_contextvars(trace=trace.trace)
        quota, headers = self._quota(principal, scope["headers"]), scope["headers"]
        if quota is not NO_QUOTA:
            send = HeaderAdder(send, quota.headers)
        try:
            async with self.bodies.read(scope, receive) as body:
                if scope["path"] not in UNLIKE_JSON:
                    await check_shape(body)
                scheme = scope.get("scheme", "http")
                arrived_s = self._workers.ports.clock.monotonic_s()
                picked = await self._seal.open(headers)
                call = Call(
                    *(body, trace, receive, send, headers, principal, quota, scheme, arrived_s, picked),
                    query=scope["query_string"],
                )
                await endpoint(call)
        except ApiError as error:
            # Here and not above: these errors too have the headers of the limits.
            await self._refuse(send, scope["path"], error)
        finally:
            quota.leave()

    def _quota(self, principal: Principal, headers: Headers) -> RequestQuota:
        if principal.authenticated:
            holder = holder_of(principal, "", self._rates)
        elif self._rates == UNLIMITED:
            return NO_QUOTA
        else:
            holder = holder_of(principal, tenant_of(headers, principal), self._rates)
        return self._limiter.quota(holder) if holder.limited else NO_QUOTA

    async def _refuse(self, send: Send, path: str, error: ApiError) -> None:
        status = await respond_error(send, path, error, self._workers.ports.ids())
        metrics.HTTP_ERRORS.labels(str(status)).inc()
        self._requests.errors += status >= 500

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether clients should be sent here, and the body of /health."""
        workers: dict[str, int] = {}
        for card in self._models.cards():
            # An earlier run may have left a pool of the same model.
            workers[card.name] = workers.get(card.name, 0) + self._workers.workers(card.pool)
        stalled: dict[str, float] = self._persistence.stalled() if self._persistence is not None else {}
        others = sorted(self._workers.stalled)
        routable = any(self._workers.is_routable(card.pool) for card in self._models.cards())
        status = self._status(any(workers.values()), routable, bool(stalled or others))
        document: dict[str, Any] = {"status": status, "workers": workers}
        if stalled or others:
            document |= {"not_persisting_s": stalled, "not_persisting": others}
        return status == "ok", document

    def _status(self, has_workers: bool, routable: bool, stalled: bool) -> str:
        if self._workers.closed:
            return "restarting"
        if self._owner.stopping:
            return "draining"
        if stalled:
            return "not persisting"
        if not has_workers:
            return "no workers"
        return "ok" if routable else "not routable"

    async def _answer(self, send: Send, document: Any) -> None:
        await respond(send, 200, msgspec.json.encode(document), [])


def _objects(
    ports: Ports, history: HistorySettings, ttl_s: int, object_bytes_max: int = OBJECT_BYTES_MAX
) -> TenantObjects | None:
    """Return the store of generated files; None if nothing is stored."""
    if not history.store:
        return None
    return TenantObjects(ports.stored, ttl_s, history.tenant_bytes_max, object_bytes_max)


def _posts(serving: Serving, generator: Generator) -> dict[str, Endpoint]:
    """What answers a POST, by its path. Those of responses, images and videos have paths below them."""
    openai = OpenAiApi(serving, generator)
    anthropic, audio = AnthropicApi(serving, generator), AudioApi(serving, generator)
    pooling, tokens = PoolingApi(serving), TokensApi(serving)
    return {
        "/v1/chat/completions": openai.chat,
        "/v1/completions": openai.complete,
        "/v1/messages": anthropic.messages,
        "/v1/messages/count_tokens": anthropic.count_tokens,
        "/v1/embeddings": pooling.embeddings,
        "/v1/classify": pooling.classify,
        "/v1/score": pooling.score,
        "/v1/rerank": pooling.rerank,
        "/v2/rerank": pooling.rerank,
        "/v1/audio/transcriptions": audio.transcribe,
        "/v1/audio/translations": audio.translate,
        "/tokenize": tokens.tokenize,
        "/detokenize": tokens.detokenize,
    }


def model_entry(model: Model) -> dict[str, Any]:
    """A model as `GET /v1/models` lists it. `limits` are those of one worker, 0 if unknown. LoRA adapters have a `parent`."""
    card = model.card
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "headwater",
        "root": card.name,
        "parent": model.parent or None,
        "max_model_len": card.context_length,
        "aliases": card.aliases,
        "engine": card.engine,
        "capabilities": card.capabilities,
        "pooling_tasks": card.pooling_tasks,
        "image_generation": card.image_generation,
        "video_generation": card.video_generation,
        "logits_processors": card.logits_processors,
        "limits": {
            "context_tokens": card.context_length,
            "running_requests": card.max_running,
            "kv_blocks": card.total_blocks,
            "block_tokens": card.block_size,
            "lora_slots": card.lora_slots,
            "media_tokens": {
                kind: most
                for kind in card.media.limits
                if (most := card.tokens_of_item_max(kind)) is not None
            },
        },
    }
