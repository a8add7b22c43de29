"""What a request for vectors leaves behind: accepted, routed per message, exactly one end; and its metrics."""

from hashlib import sha256

from headwater.actors import metrics
from headwater.actors.edge.serving import Call, Serving
from headwater.schemas.request import RequestAccepted, RequestEnded, RequestEvent, RequestRouted


class PoolingRecord:
    """The account of one request. Vectors themselves are never recorded; the body is by the edge's setting."""

    def __init__(self, serving: Serving, call: Call, request: str, model: str, endpoint: str) -> None:
        self._serving = serving
        self._trace = call.trace
        self._body = call.body
        self._request = request
        self._model = model
        self._endpoint = endpoint
        self._tokens = 0
        self._moved: dict[int, int] = {}
        self._clock = serving.fleet.world.clock
        self._began_s = self._clock.monotonic_s()

    def accepted(self, prompt_tokens: int, prompts: int) -> None:
        """The edge owes this request an end from here on."""
        self._tokens = prompt_tokens
        kind = self._serving.payload
        body = b"" if kind == "off" else sha256(self._body).digest() if kind == "hashed" else self._body
        metrics.ACTIVE.inc()
        self._write(
            RequestAccepted(
                self._request, self._model, self._endpoint, prompt_tokens, 0, False, prompts, kind, body
            )
        )

    def routed(self, number: int, attempt: str, worker: str, epoch: int) -> None:
        """A message of the request was given to a worker: `choice` is its number."""
        self._moved[number] = self._moved.get(number, -1) + 1
        self._write(RequestRouted(self._request, number, attempt, worker, epoch, 0))

    def ended(self, reason: str, error: str) -> None:
        """The one terminal event, and the metrics that go with it."""
        seconds = self._clock.monotonic_s() - self._began_s
        moved = sum(self._moved.values())
        self._write(
            RequestEnded(
                self._request,
                reason,
                0,
                0,
                moved,
                0.0,
                round(seconds * 1000, 3),
                error,
                self._serving.payload,
            )
        )
        metrics.ACTIVE.dec()
        metrics.REQUESTS.labels(self._model, self._endpoint, reason).inc()
        metrics.PROMPT_TOKENS.labels(self._model).inc(self._tokens)
        metrics.MIGRATIONS.labels(self._model).inc(moved)
        metrics.REQUEST_SECONDS.labels(self._model).observe(seconds)

    def _write(self, event: RequestEvent) -> None:
        self._serving.ledger.write(event, self._trace)
