"""Response headers that show how a request was routed. Pure."""

from headwater.actors.edge.request.saga_types import Saga
from headwater.actors.http.asgi import Headers


def routing_headers(name: str, saga: Saga, *, hides_cached: bool = False) -> Headers:
    """The headers of the request `name`, whose first choice is `saga`.

    `hides_cached`: they do not say how much of the prompt is cached.
    """
    headers: Headers = [(b"x-request-id", name.encode())]
    decision = saga.decision
    if decision is not None:
        headers += [
            (b"x-headwater-worker", decision.worker.encode()),
            (b"x-headwater-log-position", b"%d" % decision.position),
        ]
        if not hides_cached:
            headers.append((b"x-headwater-cached-blocks", b"%d" % decision.chosen.cached_blocks))
        if decision.waited_ms:
            headers.append((b"x-headwater-waited-ms", b"%d" % decision.waited_ms))
        if decision.leg:
            # A stream's headers are sent when the prompt is placed, before its decode worker is chosen.
            headers.append((b"x-headwater-leg", decision.leg.encode()))
    if saga.prefilled_by:
        headers.append((b"x-headwater-prefill-worker", saga.prefilled_by.encode()))
    return headers
