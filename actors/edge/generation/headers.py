"""Response headers that show how a request was routed. Pure."""

from headwater.actors.edge.request.saga_types import Saga
from headwater.actors.http.asgi import Headers


def routing_headers(name: str, saga: Saga) -> Headers:
    """The headers of the request `name`, whose first choice is `saga`."""
    headers: Headers = [(b"x-request-id", name.encode())]
    decision = saga.decision
    if decision is not None:
        chosen = decision.chosen
        headers += [
            (b"x-headwater-worker", decision.worker.encode()),
            (b"x-headwater-log-position", b"%d" % decision.position),
            (b"x-headwater-cached-blocks", b"%d" % chosen.cached_blocks),
        ]
        if decision.waited_ms:
            headers.append((b"x-headwater-waited-ms", b"%d" % decision.waited_ms))
        if decision.leg:
            # A stream's headers are sent when the prompt is placed, before its decode worker is chosen.
            headers.append((b"x-headwater-leg", decision.leg.encode()))
    if saga.prefilled_by:
        headers.append((b"x-headwater-prefill-worker", saga.prefilled_by.encode()))
    return headers
