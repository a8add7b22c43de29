"""The table of Prometheus metrics: the reference, the boards and the alert rules are made from it.

Names end with the base unit, counters with `_total`. No label has more values than a fleet has pools, workers, engines or models, or than the
code has reasons; tenants are a label only where `TenantMetrics` is asked to count them.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from headwater.engines import traits

if TYPE_CHECKING:
    # It loads the router's kernels, which edges and workers do not use.
    from headwater.router.replay import Tally

MODELS_KEPT: Final = 1_024
"""Models whose metrics are kept at hand; more cost the time to find them."""

_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_APPEND_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_TOKEN_SECONDS: Final = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_LONG_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

_DECIDED = Counter(
    "headwater_router_decisions_total",
    "Decisions made, by the engine of the chosen worker",
    ["pool", "engine"],
)
_PROMPT_TOKENS = Counter(
    "headwater_router_prompt_tokens_total", "Prompt tokens of requests that were routed", ["pool"]
)
_PREDICTED_TOKENS = Counter(
    "headwater_router_predicted_cached_tokens_total",
    "Those of them that the chosen worker has cached, as the index says",
    ["pool"],
)
_VOIDED = Counter(
    "headwater_router_voided_decisions_total",
    "Decisions withdrawn because no worker accepted their request",
    ["pool"],
)
_TRAFFIC_SHARE = Gauge(
    "headwater_router_traffic_share",
    "Shares of new requests by revision and by policy, as an operator or a roll-out has set them",
    ["pool", "of", "name"],
)
_ENGINE_WEIGHT = Gauge(
    "headwater_router_engine_weight", "Engine weights that an operator has set", ["pool", "engine"]
)
_REFUSED = Counter("headwater_router_refusals_total", "Route queries for which no worker was found", ["pool"])
_UNREADABLE = Counter("headwater_router_unreadable_messages_total", "Log messages skipped", ["pool"])
_UNKNOWN = Counter(
    "headwater_router_unknown_events_total", "Events of a later release, which this one ignores", ["pool"]
)
_GAPS = Counter("headwater_router_log_gaps_total", "Gaps found in the log", ["pool"])
_DECIDE_SECONDS = Histogram(
    "headwater_router_decision_seconds", "Time to make a decision", ["pool"], buckets=_SECONDS
)
_POSITION = Gauge("headwater_router_log_position", "Log position of the fold", ["pool"])
_LAG = Gauge("headwater_router_lag_messages", "Log messages not folded yet", ["pool"])
_LAG_SECONDS = Gauge(
    "headwater_router_lag_seconds", "Age of the newest folded message while the router lags", ["pool"]
)
_BREAKS = Counter("headwater_router_chain_breaks_total", "Messages found missing or out of order", ["pool"])
_BLOCKS = Gauge("headwater_router_index_blocks", "Distinct blocks in the index", ["pool"])
_BLOCKS_REFUSED = Gauge(
    "headwater_router_index_blocks_refused", "Blocks not indexed because the index is at its bound", ["pool"]
)
_WORKERS = Gauge(
    "headwater_router_workers", "Workers known, by what they do and their state", ["pool", "role", "state"]
)
_COLD = Gauge(
    "headwater_router_cold_workers",
    "Workers whose cache is unknown after lost KV events: none of their blocks count until they announce it",
    ["pool"],
)
_LAPSED = Counter(
    "headwater_router_lapsed_workers_total", "Workers whose lease ended without a farewell", ["pool"]
)
_RESYNCS = Counter(
    "headwater_router_resyncs_total",
    "Requests to workers to announce themselves and their cache again",
    ["pool"],
)
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


QUEUE_REASONS: Final = (
    "tenant",
    "full",
    "displaced",
    "deadline",
    "waited",
    "no_worker",
    "gone",
    "abandoned",
    "stopping",
)
"""Why a query got no worker from the admission queue."""


class RouterMetrics:
    """A router's metrics, bound to its pool."""

    def __init__(self, pool: str) -> None:
        self.prompt_tokens = _PROMPT_TOKENS.labels(pool)
        self.predicted_tokens = _PREDICTED_TOKENS.labels(pool)
        self.voided = _VOIDED.labels(pool)
        self.refused = _REFUSED.labels(pool)
        self.unreadable = _UNREADABLE.labels(pool)
        self.unknown = _UNKNOWN.labels(pool)
        self.gaps = _GAPS.labels(pool)
        self.seconds = _DECIDE_SECONDS.labels(pool)
        self.position = _POSITION.labels(pool)
        self.lag = _LAG.labels(pool)
        self.lag_seconds = _LAG_SECONDS.labels(pool)
        self.breaks = _BREAKS.labels(pool)
        self.blocks = _BLOCKS.labels(pool)
        self.blocks_refused = _BLOCKS_REFUSED.labels(pool)
        self.cold = _COLD.labels(pool)
        self.lapsed = _LAPSED.labels(pool)
        self.resyncs = _RESYNCS.labels(pool)
        self.queue_requests = _QUEUE_REQUESTS.labels(pool)
        self.queue_tokens = _QUEUE_TOKENS.labels(pool)
        self.busy_workers = _BUSY.labels(pool)
        self.compared = _COMPARED.labels(pool)
        self.divergence = _DIVERGENCE.labels(pool)
        self.diverged = _DIVERGED.labels(pool)
        self._pool = pool
        self._weighted: dict[str, float] = {}
        self._shares: dict[tuple[str, str], float] = {}
        self._workers: dict[tuple[str, str], int] = {}
        # Shown as 0 from the start: the first of a kind is an increase, too.
        for reason in QUEUE_REASONS:
            _QUEUE_LEFT.labels(pool, reason)

    def decided(self, engine: str) -> None:
        """A request was routed to a worker of this engine."""
        _DECIDED.labels(self._pool, engine).inc()

    def set_workers(self, workers: dict[tuple[str, str], int]) -> None:
        """Show how many workers there are of each (role, state)."""
        for kind in self._workers.keys() - workers.keys():
            _WORKERS.labels(self._pool, *kind).set(0)
        for kind, number in workers.items():
            _WORKERS.labels(self._pool, *kind).set(number)
        self._workers = workers

    def set_engine_weights(self, weights: dict[str, float]) -> None:
        """Show these engine weights. Those of engines that have none any more are removed."""
        if weights == self._weighted:
            return
        for engine in self._weighted.keys() - weights.keys():
            _ENGINE_WEIGHT.remove(self._pool, engine)
        for engine, weight in weights.items():
            _ENGINE_WEIGHT.labels(self._pool, engine).set(weight)
        self._weighted = dict(weights)

    def set_traffic_shares(self, shares: dict[tuple[str, str], float]) -> None:
        """Show these shares by (subject, name), which are few. Those of names that have none any more are removed."""
        if shares == self._shares:
            return
        for key in self._shares.keys() - shares.keys():
            _TRAFFIC_SHARE.remove(self._pool, *key)
        for key, share in shares.items():
            _TRAFFIC_SHARE.labels(self._pool, *key).set(share)
        self._shares = shares

    def waited(self, priority: int, seconds: float) -> None:
        """A query got a worker. Clients choose priorities, so only the sign is a label."""
        kind = "high" if priority < 0 else "low" if priority else "normal"
        _QUEUE_SECONDS.labels(self._pool, kind).observe(seconds)

    def left_queue(self, reason: str) -> None:
        """A query got no worker, for one of `QUEUE_REASONS`."""
        _QUEUE_LEFT.labels(self._pool, reason).inc()


_SHADOW: Final = ["pool", "policy", "judge"]
_SHADOW_JUDGED = Counter("headwater_shadow_decisions_total", "Decisions that a shadow recomputed", _SHADOW)
_SHADOW_AGREED = Counter(
    "headwater_shadow_agreed_total", "Recomputed decisions with the same worker", _SHADOW
)
_SHADOW_REGRET = Counter(
    "headwater_shadow_regret_total",
    "Cost above the minimum, in the judge's unit (ms, or blocks while times are unknown), of the routers' choices (chosen) or the shadow's (shadow)",
    [*_SHADOW, "of"],
)
_SHADOW_LATE = Counter(
    "headwater_shadow_late_decisions_total", "Decisions stored too late to be compared", _SHADOW
)
_SHADOW_UNJUDGED = Counter(
    "headwater_shadow_unjudged_decisions_total", "Decisions that could not be recomputed", _SHADOW
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


PICKER_PICKS = Counter(
    "headwater_picker_picks_total",
    "Requests of gateways, by how their endpoint was picked: decided by a router, undecided (the next in turn; the edge there decides), "
    "shed (429) or refused",
    ["outcome"],
)
PICKER_SECONDS = Histogram(
    "headwater_picker_pick_seconds",
    "Time from a request's whole body to its endpoint, queues included",
    buckets=_SECONDS,
)
PICKER_STREAMS = Gauge("headwater_picker_streams", "Streams of gateways that are open")
PICKER_DIVERTED = Counter(
    "headwater_picker_diverted_total",
    "Responses that came from another endpoint than the one that was picked",
)


class ShadowMetrics:
    """A shadow's metrics, updated from its tally by `note`."""

    def __init__(self, pool: str, policy: str, judge: str) -> None:
        who = (pool, policy, judge)
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
LOG_APPEND_SECONDS = Histogram(
    "headwater_log_append_seconds",
    "Time until an append to the log is confirmed, retries included",
    ["what"],
    buckets=_APPEND_SECONDS,
)
LOG_PENDING = Gauge("headwater_log_pending_events", "Events that the log has not confirmed yet", ["what"])
LOG_RETRIES = Counter("headwater_log_append_retries_total", "Appends that were tried again", ["what"])
LOG_DROPPED = Counter(
    "headwater_log_dropped_events_total", "Events dropped because too many were pending", ["what"]
)
_MODEL_REQUESTS = Counter("headwater_edge_requests_total", "Requests ended", ["model", "endpoint", "reason"])
HTTP_ERRORS = Counter(
    "headwater_edge_http_errors_total",
    "Error responses, those to connections above a limit included",
    ["status"],
)
RATE_LIMITED = Counter(
    "headwater_edge_rate_limited_total",
    "Requests refused by a rate limit: requests, tokens, concurrency or request_too_large",
    ["limit"],
)
for _limit in ("requests", "tokens", "concurrency", "request_too_large"):
    RATE_LIMITED.labels(_limit)
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
OPEN_CONNECTIONS = Gauge("headwater_edge_open_connections", "Connections of clients that are open")
ACTIVE = Gauge("headwater_edge_active_requests", "Requests in flight")
_MODEL_PROMPT_TOKENS = Counter("headwater_edge_prompt_tokens_total", "Prompt tokens", ["model"])
_MODEL_CACHED_TOKENS = Counter(
    "headwater_edge_cached_prompt_tokens_total", "Prompt tokens that engines had cached", ["model"]
)
_MODEL_COMPLETION_TOKENS = Counter("headwater_edge_completion_tokens_total", "Generated tokens", ["model"])
_MODEL_MIGRATIONS = Counter(
    "headwater_edge_migrations_total", "Requests migrated to another worker", ["model"]
)
SETBACKS = Counter(
    "headwater_edge_setbacks_total",
    "Legs of requests that failed, by the phase of the request and the cause: lost, timed out, refused or spent",
    ["phase", "cause"],
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
FRAME_GAPS = Counter("headwater_edge_frame_gaps_total", "Gaps in token streams, queried again")
_MODEL_TTFT_SECONDS = Histogram(
    "headwater_edge_time_to_first_token_seconds", "Accepted to first token", ["model"], buckets=_LONG_SECONDS
)
_MODEL_REQUEST_SECONDS = Histogram(
    "headwater_edge_request_seconds", "Accepted to end", ["model"], buckets=_LONG_SECONDS
)
_MODEL_TOKEN_SECONDS = Histogram(
    "headwater_edge_time_per_output_token_seconds",
    "First token to end, divided by the tokens after the first",
    ["model"],
    buckets=_TOKEN_SECONDS,
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
        self.token_seconds = _MODEL_TOKEN_SECONDS.labels(model)
        self._ended: dict[tuple[str, str], Counter] = {}
        self._model = model

    def ended(self, endpoint: str, reason: str) -> Counter:
        """Requests of an endpoint that ended for a reason."""
        counter = self._ended.get((endpoint, reason))
        if counter is None:
            counter = self._ended[endpoint, reason] = _MODEL_REQUESTS.labels(self._model, endpoint, reason)
        return counter


@lru_cache(maxsize=MODELS_KEPT)
def model_metrics(model: str) -> ModelMetrics:
    """The metrics of a served model."""
    return ModelMetrics(model)


_TENANT_REQUESTS = Counter(
    "headwater_edge_tenant_requests_total", "Requests of a tenant that ended", ["tenant", "reason"]
)
_TENANT_TOKENS = Counter(
    "headwater_edge_tenant_tokens_total",
    "Tokens of a tenant: of prompts (prompt), those of them that were cached (cached), generated ones (completion)",
    ["tenant", "kind"],
)
OTHER_TENANTS: Final = "other"
"""The label of tenants past the number that is counted one by one."""
UNNAMED_TENANT: Final = "unnamed"
"""The label of clients without a tenant's name, whom queues tell apart by a digest of their key."""
DIGEST_PREFIX: Final = "key-"


class TenantMetrics:
    """Counts requests and tokens by tenant: of the first `tenants_max` that this edge sees by name, of the rest together. 0: not at all."""

    def __init__(self) -> None:
        self.tenants_max = 0
        self._known: set[str] = set()

    def ended(self, tenant: str, reason: str, prompt: int, cached: int, completion: int) -> None:
        """A request ended for this reason, with these numbers of tokens."""
        if not self.tenants_max:
            return
        if not tenant or tenant.startswith(DIGEST_PREFIX):
            tenant = UNNAMED_TENANT
        elif tenant not in self._known:
            if len(self._known) < self.tenants_max:
                self._known.add(tenant)
            else:
                tenant = OTHER_TENANTS
        _TENANT_REQUESTS.labels(tenant, reason).inc()
        for kind, tokens in (("prompt", prompt), ("cached", cached), ("completion", completion)):
            _TENANT_TOKENS.labels(tenant, kind).inc(tokens)


TENANTS: Final = TenantMetrics()
"""Those of this process."""


# Metrics of workers, computed from their statistics (`actors.worker.inflight`) on each scrape.

WORKER_GAUGES: Final = {
    **traits.FROM_LOAD,
    "handoffs_held": (
        "headwater_worker_held_handoffs",
        "Prefilled prompts whose KV is kept for another worker",
    ),
    "embedding_bytes_held": (
        "headwater_worker_held_embedding_bytes",
        "Bytes of image embeddings on offer to other workers, or being read",
    ),
    "kv_events_pending": ("headwater_worker_pending_kv_events", "KV events that the log has not stored yet"),
    "kv_event_at_s": (
        "headwater_worker_last_kv_event_timestamp_seconds",
        "When the engine last published a KV event, in seconds of the Unix epoch; 0: never",
    ),
    "epoch": ("headwater_worker_epoch", "Epoch of the worker's incarnation"),
}
"""(name, help) by the statistic."""

WORKER_COUNTERS: Final = {
    "tokens_total": ("headwater_worker_tokens_total", "Tokens sent to edges"),
    "refused_total": (
        "headwater_worker_refused_requests_total",
        "Requests refused because of the worker's state: another worker takes them",
    ),
    "kv_events_total": ("headwater_worker_kv_events_total", "KV events that the engine published"),
    "kv_gaps_total": (
        "headwater_worker_kv_gaps_total",
        "Gaps in the engine's KV events: its cache is unknown until it is announced again",
    ),
    "kv_dropped_total": (
        "headwater_worker_dropped_kv_events_total",
        "KV events dropped because too many were pending: the cache is announced again",
    ),
}


# The table.

UNITS: Final = ("seconds", "bytes", "ratio", "tokens")
"""Base units with which names end; other metrics count what their name says."""


class MetricRow(NamedTuple):
    """One metric: `name` as exported, for a histogram without suffix; `kind` as in Prometheus; `labels` besides those of its process."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def unit(self) -> str:
        """Its base unit, "" for a count."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in UNITS else ""


def table() -> Iterator[MetricRow]:
    """Every metric of Headwater, and the common ones of engines."""
    seen = {id(metric): metric for metric in REGISTRY._names_to_collectors.values()}
    for metric in seen.values():
        if isinstance(metric, MetricWrapperBase) and metric._name.startswith("headwater_"):
            suffix = "_total" if metric._type == "counter" else ""
            yield MetricRow(
                metric._name + suffix, str(metric._type), tuple(metric._labelnames), metric._documentation
            )
    for name, text in WORKER_GAUGES.values():
        yield MetricRow(name, "gauge", ("worker",), text)
    for name, text in WORKER_COUNTERS.values():
        yield MetricRow(name, "counter", ("worker",), text)
    for common in traits.COMMON_METRICS:
        suffix = "_total" if common.kind == "counter" else ""
        yield MetricRow(traits.PREFIX + common.name + suffix, common.kind, (), common.help)


__all__ = ["REGISTRY", "RouterMetrics", "ShadowMetrics"]
