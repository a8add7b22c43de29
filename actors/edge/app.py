"""The HTTP surface: which path does what. A raw ASGI application; no framework, no middleware."""

import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import prometheus_client
import structlog

from headwater.actors import metrics
from headwater.actors.edge.body import Bodies
from headwater.actors.edge.errors import ApiError
from headwater.actors.edge.fleet import Fleet
from headwater.actors.edge.generation import Generation
from headwater.actors.edge.http import ClientGone, Headers, Receive, Scope, Send, respond
from headwater.actors.edge.json_shape import check_shape
from headwater.actors.edge.ledger import Ledger
from headwater.actors.edge.limits import BodyLimits
from headwater.actors.edge.model_list import listed
from headwater.actors.edge.models import Models
from headwater.actors.edge.our_fields import Attempts
from headwater.actors.edge.pooling_api import PoolingApi
from headwater.actors.edge.serving import Call, Serving, trace_of
from headwater.actors.edge.wishes import ClientLimits
from headwater.actors.persistence import Persistence
from headwater.schemas.request import PayloadKind

_log = structlog.get_logger("headwater.edge")


class App:
    """The ASGI application of one edge."""

    def __init__(
        self,
        fleet: Fleet,
        models: Models,
        ledger: Ledger,
        draining: Callable[[], bool],
        payload: PayloadKind = "off",
        limits: ClientLimits | None = None,
        bodies: BodyLimits | None = None,
        *,
        special_tokens_in_text: bool = False,
        persistence: Persistence | None = None,
    ) -> None:
        self._fleet = fleet
        self.bodies = Bodies(bodies)
        self._models = models
        self._persistence = persistence
        self._draining = draining
        serving = Serving(
            fleet,
            models,
            ledger,
            payload,
            Attempts(),
            limits or ClientLimits(),
            special_tokens_in_text,
        )
        generation, pooling = Generation(serving), PoolingApi(serving)
        self._posts: dict[str, Callable[[Call], Awaitable[None]]] = {
            "/v1/chat/completions": generation.chat,
            "/v1/completions": generation.complete,
            "/v1/embeddings": pooling.embeddings,
            "/v1/classify": pooling.classify,
            "/v1/score": pooling.score,
            "/v1/rerank": pooling.rerank,
            "/v2/rerank": pooling.rerank,
        }
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
        post = self._posts.get(path)
        if post is not None:
            _only("POST", method)
            async with self.bodies.read(scope, receive) as body:
                await check_shape(body)
                await post(Call(body, trace_of(scope), receive, send, scope["headers"]))
        elif path == "/v1/models":
            _only("GET", method)
            await self._answer(send, {"object": "list", "data": [listed(m) for m in self._models.all()]})
        elif path.startswith("/v1/models/"):
            _only("GET", method)
            await self._answer(send, listed(self._models.get(path.removeprefix("/v1/models/"))))
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
        stalled: dict[str, float] = self._persistence.stalled() if self._persistence is not None else {}
        others = sorted(self._fleet.stalled)
        status = self._status(any(workers.values()), bool(stalled or others))
        document: dict[str, Any] = {"status": status, "workers": workers}
        if stalled or others:
            document |= {"not_persisting_s": stalled, "not_persisting": others}
        body = msgspec.json.encode(document)
        await respond(send, 200 if status == "ok" else 503, body, [])

    def _status(self, has_workers: bool, stalled: bool) -> str:
        if self._fleet.closed:
            return "restarting"
        if self._draining():
            return "draining"
        if stalled:
            return "not persisting"
        return "ok" if has_workers else "no workers"

    async def _answer(self, send: Send, document: Any) -> None:
        await respond(send, 200, msgspec.json.encode(document), [])


def _only(wanted: str, method: str) -> None:
    if method != wanted:
        raise ApiError(405, f"Use {wanted} here.", code="method_not_allowed")


def _retry_after(error: ApiError) -> Headers:
    if error.retry_after_s <= 0:
        return []
    return [(b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s)))]
