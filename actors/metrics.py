"""Prometheus metrics by name, with units last. All in one place, as the reference for dashboards."""

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

if TYPE_CHECKING:
    # It loads the router's kernels, which edges and workers do not use.
    from headwater.router.shadow import Tally

MODELS_KEPT: Final = 1_024
"""Models whose metrics are kept at hand; more cost the time to find them."""

_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_LONG_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

_DECIDED = Counter("headwater_router_decisions_total", "Decisions made", ["pool"])
_DECIDED_BY_ENGINE = Counter(
    "headwater_router_engine_decisions_total",
    "Decisions made, by the engine of the chosen worker",
    ["pool", "engine"],
)
_ENGINE_WEIGHT = Gauge(
    "headwater_router_engine_weight", "Engine weights that an operator has set", ["pool", "engine"]
)
_REFUSED = Counter("headwater_router_refusals_total", "Route queries for which no worker was found", ["pool"])
_UNRECORDED = Counter(
    "headwater_router_unrecorded_decisions_total", "Decisions that the log did not accept", ["pool"]
)
_UNREADABLE = Counter("headwater_router_unreadable_messages_total", "Log messages skipped", ["pool"])
_GAPS = Counter("headwater_router_log_gaps_total", "Gaps found in the log", ["pool"])
_DECIDE_SECONDS = Histogram(
    "headwater_router_decision_seconds", "Time to make a decision", ["pool"], buckets=_SECONDS
)
_POSITION = Gauge("headwater_router_log_position", "Log position of the fold", ["pool"])
_LAG = Gauge("headwater_router_lag_messages", "Log messages not folded yet", ["pool"])
_LAG_EVENTS = Gauge("headwater_router_lag_events", "Estimated number of events in those messages", ["pool"])
_LAG_SECONDS = Gauge(
    "headwater_router_lag_seconds", "Age of the newest folded message while the router lags", ["pool"]
)
_BREAKS = Counter("headwater_router_chain_breaks_total", "Messages found missing or out of order", ["pool"])
_BLOCKS = Gauge("headwater_router_index_blocks", "Distinct blocks in the index", ["pool"])
_BLOCKS_REFUSED = Gauge(
    "headwater_router_index_blocks_refused", "Blocks not indexed because the index is at its bound", ["pool"]
)
_WORKERS = Gauge("headwater_router_workers", "Workers known", ["pool"])
_QUEUE_REQUESTS = Gauge("headwater_router_queue_requests", "Queries in the admission queue", ["pool"])
_QUEUE_TOKENS = Gauge(
    "headwater_router_queue_tokens", "Prompt tokens of the queries in the admission queue", ["pool"]
)
_QUEUE_SECONDS = Histogram(
    "headwater_router_queue_seconds",
    "Time in the admission queue, of queries that got a worker",
    ["pool", "priority"],
    buckets=_LONG_SECONDS,
)
_BUSY = Gauge(
    "headwater_router_busy_workers",
    "Saturated workers: they get only requests that can neither wait nor go to another worker",
    ["pool"],
)
_QUEUE_LEFT = Counter(
    "headwater_router_queue_refusals_total",
    "Queries that were refused by the admission queue or left it without a worker",
    ["pool", "reason"],
)
_COMPARED = Counter("headwater_router_compared_total", "State digests compared with another router", ["pool"])
_DIVERGENCE = Counter(
    "headwater_router_divergence_total",
    "Times another router had another state at the same log position",
    ["pool"],
)
_DIVERGED = Gauge(
    "headwater_router_diverged_routers", "Routers that had another state when last compared", ["pool"]
)


class RouterMetrics:
    """A router's metrics, bound to its pool."""

    def __init__(self, pool: str) -> None:
        self.decided = _DECIDED.labels(pool)
        self.refused = _REFUSED.labels(pool)
        self.unrecorded = _UNRECORDED.labels(pool)
        self.unreadable = _UNREADABLE.labels(pool)
        self.gaps = _GAPS.labels(pool)
        self.seconds = _DECIDE_SECONDS.labels(pool)
        self.position = _POSITION.labels(pool)
        self.lag = _LAG.labels(pool)
        self.lag_events = _LAG_EVENTS.labels(pool)
        self.lag_seconds = _LAG_SECONDS.labels(pool)
        self.breaks = _BREAKS.labels(pool)
        self.blocks = _BLOCKS.labels(pool)
        self.blocks_refused = _BLOCKS_REFUSED.labels(pool)
        self.workers = _WORKERS.labels(pool)
        self.queue_requests = _QUEUE_REQUESTS.labels(pool)
        self.queue_tokens = _QUEUE_TOKENS.labels(pool)
        self.busy_workers = _BUSY.labels(pool)
        self.compared = _COMPARED.labels(pool)
        self.divergence = _DIVERGENCE.labels(pool)
        self.diverged = _DIVERGED.labels(pool)
        self._pool = pool
        self._weighted: dict[str, float] = {}

    def decided_for(self, engine: str) -> None:
        """A request was routed to a worker of this engine."""
        _DECIDED_BY_ENGINE.labels(self._pool, engine).inc()

    def set_engine_weights(self, weights: dict[str, float]) -> None:
        """Show these engine weights. Those of engines that have none any more are removed."""
        if weights == self._weighted:
            return
        for engine in self._weighted.keys() - weights.keys():
            _ENGINE_WEIGHT.remove(self._pool, engine)
        for engine, weight in weights.items():
            _ENGINE_WEIGHT.labels(self._pool, engine).set(weight)
        self._weighted = dict(weights)

    def waited(self, priority: int, seconds: float) -> None:
        """A query got a worker. Clients choose priorities, so only the sign is a label."""
        kind = "high" if priority < 0 else "low" if priority else "normal"
        _QUEUE_SECONDS.labels(self._pool, kind).observe(seconds)

    def left_queue(self, reason: str) -> None:
        """A query got no worker: tenant, full, displaced, deadline, waited, no_worker, gone, abandoned or stopping."""
        _QUEUE_LEFT.labels(self._pool, reason).inc()


_SHADOW: Final = ["pool", "policy", "judge"]
_SHADOW_JUDGED = Counter("headwater_shadow_decisions_total", "Decisions that a shadow recomputed", _SHADOW)
_SHADOW_AGREED = Counter(
    "headwater_shadow_agreed_total", "Recomputed decisions with the same worker", _SHADOW
)
_SHADOW_AGREEMENT = Gauge(
    "headwater_shadow_agreement_ratio", "Share of recomputed decisions with the same worker", _SHADOW
)
_SHADOW_REGRET = Counter(
    "headwater_shadow_regret_total",
    "Cost above the minimum, by the judge's weights, of the routers' or the shadow's choices",
    [*_SHADOW, "of"],
)
_SHADOW_LATE = Counter(
    "headwater_shadow_late_decisions_total", "Decisions stored too late to be compared", _SHADOW
)
_SHADOW_UNJUDGED = Counter(
    "headwater_shadow_unjudged_decisions_total", "Decisions that could not be recomputed", _SHADOW
)
_SHADOW_UNRECORDED = Counter(
    "headwater_shadow_unrecorded_total", "Findings that the log did not accept", _SHADOW
)
_SHADOW_POSITION = Gauge("headwater_shadow_log_position", "Log position of the shadow's fold", _SHADOW)
_FORESEEN: Final = "of routed prompts: predicted by the router (predicted), what the engine did (actual), or their absolute difference"
_CACHED_TOKENS = Counter("headwater_shadow_cached_tokens_total", f"Cached tokens {_FORESEEN}", ["pool", "of"])
_CACHED_COUNT = Counter("headwater_shadow_cached_prompts_total", "Prompts counted there", ["pool"])
_FIRST_SECONDS = Counter(
    "headwater_shadow_time_to_first_token_seconds_total",
    f"Time to the first token {_FORESEEN}",
    ["pool", "of"],
)
_FIRST_COUNT = Counter(
    "headwater_shadow_time_to_first_token_prompts_total", "Prompts counted there", ["pool"]
)


TRACER_REQUESTS = Counter(
    "headwater_tracer_requests_total",
    "Requests that ended, by why their traces were sent: sampled, error, migrated, slow; or that they were left out",
    ["reason"],
)
TRACER_SPANS = Counter(
    "headwater_tracer_spans_total",
    "Spans sent to the receiver, and dropped because it refused them for minutes",
    ["outcome"],
)
TRACER_FAILURES = Counter("headwater_tracer_failures_total", "Attempts to send spans that failed")
TRACER_LAG = Gauge(
    "headwater_tracer_lag_messages", "Messages of the request log that the tracer has not read"
)
TRACER_GAPS = Counter("headwater_tracer_log_gaps_total", "Gaps found in the request log")
TRACER_LEFT_OUT = Gauge(
    "headwater_tracer_left_out_requests",
    "Requests without a trace because they were open for too long, or a part of the log was missing",
)


class ShadowMetrics:
    """A shadow's metrics, updated from its tally by `note`."""

    def __init__(self, pool: str, policy: str, judge: str) -> None:
        who = (pool, policy, judge)
        self.unrecorded = _SHADOW_UNRECORDED.labels(*who)
        self._agreement = _SHADOW_AGREEMENT.labels(*who)
        self._position = _SHADOW_POSITION.labels(*who)
        self._counters = (
            _SHADOW_JUDGED.labels(*who),
            _SHADOW_AGREED.labels(*who),
            _SHADOW_REGRET.labels(*who, "chosen"),
            _SHADOW_REGRET.labels(*who, "shadow"),
            _SHADOW_LATE.labels(*who),
            _SHADOW_UNJUDGED.labels(*who),
            *_prediction(pool, _CACHED_COUNT, _CACHED_TOKENS),
            *_prediction(pool, _FIRST_COUNT, _FIRST_SECONDS),
        )
        self._noted = [0.0] * len(self._counters)

    def note(self, tally: "Tally", position: int) -> None:
        """Add the changes since the last call."""
        self._position.set(position)
        self._agreement.set(tally.agreed / tally.judged if tally.judged else 0.0)
        sums = [
            *(
                tally.judged,
                tally.agreed,
                tally.regret_chosen,
                tally.regret_shadow,
                tally.late,
                tally.unjudged,
            ),
            *(getattr(tally.cached_tokens, name) for name in tally.cached_tokens.__struct_fields__),
            *(getattr(tally.first_token_s, name) for name in tally.first_token_s.__struct_fields__),
        ]
        for at, (counter, total) in enumerate(zip(self._counters, sums, strict=True)):
            counter.inc(max(0.0, total - self._noted[at]))
            self._noted[at] = total


def _prediction(pool: str, count: Counter, sums: Counter) -> list[Counter]:
    """Return the counters in the order of the fields of `Errors`."""
    return [count.labels(pool), *(sums.labels(pool, of) for of in ("predicted", "actual", "difference"))]


LOG_STALLED = Gauge(
    "headwater_log_stalled_seconds",
    "How long appends or lease renewals have been unanswered, 0 below 4 s",
    ["what"],
)
_MODEL_REQUESTS = Counter("headwater_edge_requests_total", "Requests ended", ["model", "endpoint", "reason"])
HTTP_ERRORS = Counter("headwater_edge_http_errors_total", "Error responses", ["status"])
RATE_LIMITED = Counter(
    "headwater_edge_rate_limited_total",
    "Requests refused by a rate limit: requests, tokens, concurrency or request_too_large",
    ["limit"],
)
LIMIT_ACCOUNTS = Gauge(
    "headwater_edge_limit_accounts", "Holders of rate limits and models whose use is counted"
)
HISTORY_FAILURES = Counter(
    "headwater_edge_stored_responses_failures_total",
    "Accesses to stored responses that failed or were too slow",
)
HISTORY_TRIMMED = Counter(
    "headwater_edge_stored_objects_trimmed_total",
    "Stored responses and conversation items discarded because their tenant stores more than its share",
)
VIDEO_JOBS = Gauge("headwater_edge_video_jobs", "Video jobs that this edge has generated at present")
VIDEO_TAKEOVERS = Counter(
    "headwater_edge_video_jobs_taken_over_total", "Video jobs taken over from an edge that ended, or died"
)
ACTIVE = Gauge("headwater_edge_active_requests", "Requests in flight")
_MODEL_PROMPT_TOKENS = Counter("headwater_edge_prompt_tokens_total", "Prompt tokens", ["model"])
_MODEL_CACHED_TOKENS = Counter(
    "headwater_edge_cached_prompt_tokens_total", "Prompt tokens that engines had cached", ["model"]
)
_MODEL_COMPLETION_TOKENS = Counter("headwater_edge_completion_tokens_total", "Generated tokens", ["model"])
_MODEL_MIGRATIONS = Counter(
    "headwater_edge_migrations_total", "Requests migrated to another worker", ["model"]
)
STRIPPED = Counter("headwater_edge_stripped_fields_total", "Reserved fields removed from requests", ["field"])
MEDIA = Counter(
    "headwater_edge_media_items_total",
    "Images, audio and video of requests, by how fetching and decoding ended: ok, or the code of the error",
    ["kind", "outcome"],
)
MEDIA_SECONDS = Histogram(
    "headwater_edge_media_seconds",
    "Time to fetch and decode an item of media, waiting for a process included",
    ["kind"],
    buckets=_LONG_SECONDS,
)
MEDIA_FETCHED_BYTES = Counter("headwater_worker_media_bytes_total", "Bytes of media fetched from edges")
MEDIA_LOADS = Counter(
    "headwater_worker_media_loads_total",
    "Media that requests needed, by where they came from: cache, edge (in pieces), or offer (over NIXL or shared memory; offer_failed: then in pieces)",
    ["source"],
)
ENCODE_LEGS = Counter(
    "headwater_edge_encode_legs_total",
    "Images for encode workers, by how that ended: cached or computed there, left to the serving worker as faster, or failed",
    ["outcome"],
)
IMAGES_ENCODED = Counter(
    "headwater_worker_images_encoded_total",
    "Images, videos and audio clips that an encode worker was asked for: computed, cached or refused",
    ["outcome"],
)
EMBEDDINGS_READ = Counter(
    "headwater_worker_embeddings_read_total",
    "Embeddings read from encode workers, or failed to be",
    ["outcome"],
)
EMBEDDING_BYTES = Counter(
    "headwater_worker_embedding_bytes_total", "Bytes of embeddings read from encode workers"
)
ORPHANS = Counter(
    "headwater_worker_orphans_total",
    "Requests aborted as no edge receives their tokens: it died, or a cancellation was lost",
)
FRAMES = Counter("headwater_edge_frames_total", "Token frames received")
FRAME_GAPS = Counter("headwater_edge_frame_gaps_total", "Gaps in token streams, queried again")
_MODEL_TTFT_SECONDS = Histogram(
    "headwater_edge_time_to_first_token_seconds", "Accepted to first token", ["model"], buckets=_LONG_SECONDS
)
_MODEL_REQUEST_SECONDS = Histogram(
    "headwater_edge_request_seconds", "Accepted to end", ["model"], buckets=_LONG_SECONDS
)


class ModelMetrics:
    """An edge's metrics of one model. Finding a metric by its labels costs more than counting."""

    def __init__(self, model: str) -> None:
        self.prompt_tokens = _MODEL_PROMPT_TOKENS.labels(model)
        self.cached_tokens = _MODEL_CACHED_TOKENS.labels(model)
        self.completion_tokens = _MODEL_COMPLETION_TOKENS.labels(model)
        self.migrations = _MODEL_MIGRATIONS.labels(model)
        self.request_seconds = _MODEL_REQUEST_SECONDS.labels(model)
        self.ttft_seconds = _MODEL_TTFT_SECONDS.labels(model)
        self._ended: dict[tuple[str, str], Counter] = {}
        self._model = model

    def ended(self, endpoint: str, reason: str) -> Counter:
        """Requests of an endpoint that ended for a reason."""
        found = self._ended.get((endpoint, reason))
        if found is None:
            found = self._ended[endpoint, reason] = _MODEL_REQUESTS.labels(self._model, endpoint, reason)
        return found


@lru_cache(maxsize=MODELS_KEPT)
def model_metrics(model: str) -> ModelMetrics:
    """The metrics of a served model."""
    return ModelMetrics(model)


__all__ = ["REGISTRY", "RouterMetrics", "ShadowMetrics"]
