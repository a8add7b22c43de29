"""Prometheus names, units last. One place, so that a dashboard can be written from this file."""

from typing import Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_LONG_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

_DECIDED = Counter("headwater_router_decisions_total", "Decisions made", ["pool"])
_REFUSED = Counter("headwater_router_refusals_total", "Queries for which no worker was found", ["pool"])
_UNRECORDED = Counter(
    "headwater_router_unrecorded_decisions_total", "Decisions that the log could not take", ["pool"]
)
_UNREADABLE = Counter("headwater_router_unreadable_messages_total", "Log messages skipped", ["pool"])
_GAPS = Counter("headwater_router_log_gaps_total", "Gaps met in the log", ["pool"])
_DECIDE_SECONDS = Histogram("headwater_router_decision_seconds", "Time to decide", ["pool"], buckets=_SECONDS)
_POSITION = Gauge("headwater_router_log_position", "Log position of the fold", ["pool"])
_LAG = Gauge("headwater_router_lag_messages", "Log messages not folded yet", ["pool"])
_LAG_EVENTS = Gauge("headwater_router_lag_events", "About how many events those messages hold", ["pool"])
_LAG_SECONDS = Gauge(
    "headwater_router_lag_seconds", "Age of the newest folded message while behind", ["pool"]
)
_BREAKS = Counter("headwater_router_chain_breaks_total", "Messages found missing or out of place", ["pool"])
_BLOCKS = Gauge("headwater_router_index_blocks", "Distinct blocks in the index", ["pool"])
_BLOCKS_REFUSED = Gauge(
    "headwater_router_index_blocks_refused", "Blocks not noted since the index is at its bound", ["pool"]
)
_WORKERS = Gauge("headwater_router_workers", "Workers known", ["pool"])


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


REQUESTS = Counter("headwater_edge_requests_total", "Requests ended", ["model", "endpoint", "reason"])
HTTP_ERRORS = Counter("headwater_edge_http_errors_total", "Error responses", ["status"])
ACTIVE = Gauge("headwater_edge_active_requests", "Requests that are owed an end")
PROMPT_TOKENS = Counter("headwater_edge_prompt_tokens_total", "Prompt tokens", ["model"])
CACHED_TOKENS = Counter(
    "headwater_edge_cached_prompt_tokens_total", "Prompt tokens engines did not compute anew", ["model"]
)
COMPLETION_TOKENS = Counter("headwater_edge_completion_tokens_total", "Generated tokens", ["model"])
MIGRATIONS = Counter("headwater_edge_migrations_total", "Requests moved to another worker", ["model"])
STRIPPED = Counter(
    "headwater_edge_stripped_fields_total", "Fields in requests that only the fleet may set", ["field"]
)
FRAMES = Counter("headwater_edge_frames_total", "Token frames received")
FRAME_GAPS = Counter("headwater_edge_frame_gaps_total", "Holes in a token stream, asked for again")
TTFT_SECONDS = Histogram(
    "headwater_edge_time_to_first_token_seconds", "Accepted to first token", ["model"], buckets=_LONG_SECONDS
)
REQUEST_SECONDS = Histogram(
    "headwater_edge_request_seconds", "Accepted to end", ["model"], buckets=_LONG_SECONDS
)
__all__ = ["REGISTRY", "RouterMetrics"]
