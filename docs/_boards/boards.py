"""What each board asks. A panel answers one question of somebody who was woken; what it does not help to decide is not on a board.

`$r` stands for Grafana's rate interval. Several routers of a pool report the same fold, so their gauges are combined by `max`.
"""

from typing import Final, Literal, NamedTuple

Unit = Literal["short", "reqps", "s", "percentunit", "ops"]


class Query(NamedTuple):
    """A PromQL expression, and the legend of its series."""

    expr: str
    legend: str


class Panel(NamedTuple):
    """One question. `wide`: it takes the whole row."""

    title: str
    unit: Unit
    queries: tuple[Query, ...]
    wide: bool = False


class Board(NamedTuple):
    """A board; `name` is the one of its file."""

    name: str
    title: str
    purpose: str
    panels: tuple[Panel, ...]


def _panel(title: str, unit: Unit, *queries: tuple[str, str], wide: bool = False) -> Panel:
    return Panel(title, unit, tuple(Query(*query) for query in queries), wide)


def _times(title: str, metric: str, by: str, *quantiles: float) -> Panel:
    """Quantiles of a histogram of seconds, a series for each value of a label."""
    queries = [
        (
            f"histogram_quantile({quantile}, sum by ({by}, le) (rate({metric}_bucket[$r])))",
            f"p{quantile * 100:g} {{{{{by}}}}}",
        )
        for quantile in quantiles
    ]
    return _panel(title, "s", *queries)


FLEET: Final = Board(
    "fleet",
    "Fleet",
    "Does the fleet serve, who is missing, and what do clients get?",
    (
        _panel(
            "How do requests end?",
            "reqps",
            ("sum by (reason) (rate(headwater_edge_requests_total[$r]))", "{{reason}}"),
        ),
        _panel(
            "Which errors do clients get?",
            "reqps",
            ("sum by (status) (rate(headwater_edge_http_errors_total[$r]))", "{{status}}"),
        ),
        _panel(
            "Which workers are there, in which state?",
            "short",
            ("max by (pool, role, state) (headwater_router_workers)", "{{pool}} {{role}} {{state}}"),
        ),
        _panel(
            "Which processes answer Prometheus?",
            "short",
            ('min by (component, name) (up{job="headwater"})', "{{component}} {{name}}"),
        ),
        _panel(
            "How much is in flight, and how much waits?",
            "short",
            ("sum(headwater_edge_open_connections)", "connections of clients"),
            ("sum(headwater_edge_active_requests)", "in flight at edges"),
            ("sum by (pool) (headwater_router_queue_requests)", "queued for {{pool}}"),
            ("sum by (pool) (headwater_engine_waiting_requests)", "waiting in engines of {{pool}}"),
        ),
        _panel(
            "Are workers saturated, and who is turned away?",
            "reqps",
            (
                "sum by (pool, reason) (rate(headwater_router_queue_refusals_total[$r]))",
                "{{pool}} {{reason}}",
            ),
            ("sum by (limit) (rate(headwater_edge_rate_limited_total[$r]))", "rate limit: {{limit}}"),
        ),
        _panel(
            "Which parts of requests fail, and move?",
            "ops",
            ("sum by (phase, cause) (rate(headwater_edge_setbacks_total[$r]))", "{{phase}} {{cause}}"),
            ("sum by (model) (rate(headwater_edge_migrations_total[$r]))", "migrated: {{model}}"),
        ),
        _panel(
            "Do workers end and come back?",
            "short",
            ("changes(headwater_worker_epoch[15m])", "{{worker}}, new epochs in 15 min"),
            (
                "sum by (pool) (increase(headwater_router_lapsed_workers_total[15m]))",
                "leases lapsed, {{pool}}",
            ),
        ),
    ),
)

ROUTING: Final = Board(
    "routing",
    "Routing quality",
    "Are the choices good, and does what the router believes agree with what engines find?",
    (
        _panel(
            "Which share of prompts is cached: predicted, and found?",
            "percentunit",
            (
                "sum(rate(headwater_router_predicted_cached_tokens_total[$r])) / sum(rate(headwater_router_prompt_tokens_total[$r]))",
                "predicted by routers",
            ),
            (
                "sum(rate(headwater_edge_cached_prompt_tokens_total[$r])) / sum(rate(headwater_edge_prompt_tokens_total[$r]))",
                "found by engines",
            ),
            wide=True,
        ),
        _panel(
            "Where do requests go?",
            "reqps",
            ("sum by (pool, engine) (rate(headwater_router_decisions_total[$r]))", "{{pool}} {{engine}}"),
            ("sum by (pool) (rate(headwater_router_refusals_total[$r]))", "{{pool}}: no worker"),
        ),
        _times("How long does a decision take?", "headwater_router_decision_seconds", "pool", 0.5, 0.99),
        _panel(
            "How much worse than the best choice is the choice (shadow)?",
            "short",
            (
                "sum by (pool, policy, of) (rate(headwater_shadow_regret_total[$r])) / ignoring (of) group_left "
                "sum by (pool, policy) (rate(headwater_shadow_decisions_total[$r]))",
                "{{pool}} {{of}} ({{policy}})",
            ),
        ),
        _panel(
            "Would another policy choose the same (shadow)?",
            "percentunit",
            (
                "sum by (pool, policy) (rate(headwater_shadow_agreed_total[$r])) / sum by (pool, policy) (rate(headwater_shadow_decisions_total[$r]))",
                "{{pool}} {{policy}}",
            ),
        ),
        _panel(
            "How wrong are predicted first tokens (shadow)?",
            "s",
            (
                "sum by (pool, of) (rate(headwater_shadow_time_to_first_token_seconds_total[$r])) / ignoring (of) group_left "
                "sum by (pool) (rate(headwater_shadow_time_to_first_token_prompts_total[$r]))",
                "{{pool}} {{of}}",
            ),
        ),
        _panel(
            "Is the index whole?",
            "short",
            ("max by (pool) (headwater_router_index_blocks)", "{{pool}} blocks"),
            ("max by (pool) (headwater_router_index_blocks_refused)", "{{pool}} blocks refused"),
            ("max by (pool) (headwater_router_cold_workers)", "{{pool}} cold workers"),
        ),
    ),
)

LATENCY: Final = Board(
    "latency",
    "Latency",
    "Is it slow, for whom, and where is the time spent?",
    (
        _times(
            "How long until the first token?",
            "headwater_edge_time_to_first_token_seconds",
            "model",
            0.5,
            0.9,
            0.99,
        ),
        _times(
            "How long between tokens?",
            "headwater_edge_time_per_output_token_seconds",
            "model",
            0.5,
            0.9,
            0.99,
        ),
        _times("How long does a request take?", "headwater_edge_request_seconds", "model", 0.5, 0.9, 0.99),
        _times("Does it wait for admission?", "headwater_router_queue_seconds", "priority", 0.5, 0.99),
        _times("Does it wait in the engine?", "headwater_engine_queue_seconds", "pool", 0.5, 0.99),
        _times(
            "How long does the engine take to the first token?",
            "headwater_engine_time_to_first_token_seconds",
            "pool",
            0.5,
            0.99,
        ),
    ),
)

LOG: Final = Board(
    "log",
    "Log",
    "Does the log take what is written, do routers follow it, and do engines publish their KV events?",
    (
        _times("How long does an append take?", "headwater_log_append_seconds", "what", 0.5, 0.99),
        _panel(
            "Is anything stalled, retried or dropped?",
            "short",
            ("max by (what) (headwater_log_stalled_seconds)", "{{what}}: seconds stalled"),
            (
                "sum by (what) (increase(headwater_log_append_retries_total[5m]))",
                "{{what}}: retries in 5 min",
            ),
            (
                "sum by (what) (increase(headwater_log_dropped_events_total[5m]))",
                "{{what}}: dropped in 5 min",
            ),
        ),
        _panel(
            "How much waits for the log?",
            "short",
            ("sum by (what) (headwater_log_pending_events)", "{{what}}"),
        ),
        _panel(
            "How far behind is each router?",
            "short",
            ("headwater_router_lag_messages", "{{name}} messages"),
            ("headwater_router_lag_seconds", "{{name}} seconds"),
        ),
        _panel(
            "Do all routers have the same state?",
            "short",
            ("headwater_router_diverged_routers", "{{name}}: routers with another state"),
            ("rate(headwater_router_compared_total[$r])", "{{name}}: comparisons per second"),
        ),
        _panel(
            "Is the log damaged?",
            "short",
            ("increase(headwater_router_chain_breaks_total[15m])", "{{name}} chain breaks"),
            ("increase(headwater_router_unreadable_messages_total[15m])", "{{name}} unreadable"),
            ("increase(headwater_router_log_gaps_total[15m])", "{{name}} gaps"),
        ),
        _panel(
            "Does each engine publish its KV events?",
            "ops",
            ("rate(headwater_worker_kv_events_total[$r])", "{{worker}} events"),
            ("rate(headwater_worker_kv_gaps_total[$r])", "{{worker}} gaps"),
            ("rate(headwater_worker_dropped_kv_events_total[$r])", "{{worker}} dropped"),
        ),
        _panel(
            "When did it last publish one?",
            "s",
            ("time() - (headwater_worker_last_kv_event_timestamp_seconds > 0)", "{{worker}}"),
        ),
    ),
)

ENGINE: Final = Board(
    "engine",
    "Engines",
    "Which worker is the odd one, and is it out of KV blocks, of time, or of requests?",
    (
        _panel(
            "What runs, and what waits?",
            "short",
            ("headwater_engine_running_requests", "{{worker}} running"),
            ("headwater_engine_waiting_requests", "{{worker}} waiting"),
        ),
        _panel(
            "How full is the KV cache?",
            "percentunit",
            ("headwater_engine_used_blocks / headwater_engine_total_blocks", "{{worker}}"),
        ),
        _panel(
            "How much does it generate?",
            "short",
            ("sum by (worker) (rate(headwater_engine_generated_tokens_total[$r]))", "{{worker}} tokens/s"),
        ),
        _panel(
            "Which share of its prompts was cached?",
            "percentunit",
            (
                "sum by (worker) (rate(headwater_engine_cached_prompt_tokens_total[$r])) / sum by (worker) (rate(headwater_engine_prompt_tokens_total[$r]))",
                "{{worker}}",
            ),
        ),
        _times("How long do requests wait there?", "headwater_engine_queue_seconds", "worker", 0.5, 0.99),
        _times(
            "How long between its tokens?",
            "headwater_engine_time_per_output_token_seconds",
            "worker",
            0.5,
            0.99,
        ),
        _panel(
            "Does it preempt, or refuse?",
            "ops",
            ("sum by (worker) (rate(headwater_engine_preemptions_total[$r]))", "{{worker}} preempted"),
            ("rate(headwater_worker_refused_requests_total[$r])", "{{worker}} refused"),
        ),
        _panel(
            "Does it keep KV for others that nobody fetches?",
            "short",
            ("headwater_worker_held_handoffs", "{{worker}}"),
        ),
    ),
)

TENANTS: Final = Board(
    "tenants",
    "Tenants",
    "Who sends what, and who gets errors? Needs `--metrics-tenants` of the edges.",
    (
        _panel(
            "Who sends requests?",
            "reqps",
            ("sum by (tenant) (rate(headwater_edge_tenant_requests_total[$r]))", "{{tenant}}"),
        ),
        _panel(
            "How do they end?",
            "reqps",
            (
                "sum by (tenant, reason) (rate(headwater_edge_tenant_requests_total[$r]))",
                "{{tenant}} {{reason}}",
            ),
        ),
        _panel(
            "Who uses tokens?",
            "short",
            ("sum by (tenant, kind) (rate(headwater_edge_tenant_tokens_total[$r]))", "{{tenant}} {{kind}}"),
        ),
        _panel(
            "Whose prompts are cached?",
            "percentunit",
            (
                'sum by (tenant) (rate(headwater_edge_tenant_tokens_total{kind="cached"}[$r])) / '
                'sum by (tenant) (rate(headwater_edge_tenant_tokens_total{kind="prompt"}[$r]))',
                "{{tenant}}",
            ),
        ),
    ),
)

BOARDS: Final = (FLEET, ROUTING, LATENCY, LOG, ENGINE, TENANTS)
