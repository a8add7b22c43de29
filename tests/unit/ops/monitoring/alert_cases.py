"""Series on which each alert fires, and on which it does not, in promtool's notation: `start+stepxcount`, a sample each 15 s, looked at after 30 min."""

from collections.abc import Mapping
from typing import Final, NamedTuple

STEP_S: Final = 15
AT: Final = "30m"

ROUTER: Final = 'component="router",name="router-0",instance="r0",pool="p"'
WORKER: Final = 'component="worker",name="worker-0",worker="worker-0",instance="w0"'
READY: Final = f'headwater_router_workers{{{ROUTER},role="both",state="ready"}}'
PROCESS: Final = 'up{job="headwater",component="worker",name="worker-0",instance="w0"}'
EPOCH: Final = f"headwater_worker_epoch{{{WORKER}}}"
POSITION: Final = f"headwater_router_log_position{{{ROUTER}}}"
ENDED: Final = 'headwater_edge_requests_total{model="m",reason="stop"}'
ERRORS: Final = 'headwater_edge_requests_total{model="m",reason="error"}'
REFUSED: Final = f'headwater_router_queue_refusals_total{{{ROUTER},reason="full"}}'
STALLED: Final = 'headwater_log_stalled_seconds{component="edge",name="edge-0",what="request log"}'
DROPPED: Final = 'headwater_log_dropped_events_total{component="edge",name="edge-0",what="requests"}'
LAG: Final = f"headwater_router_lag_seconds{{{ROUTER}}}"
DIVERGED: Final = f"headwater_router_diverged_routers{{{ROUTER}}}"
BREAKS: Final = f"headwater_router_chain_breaks_total{{{ROUTER}}}"
KV_EVENTS: Final = f"headwater_worker_kv_events_total{{{WORKER}}}"
TOKENS: Final = f"headwater_worker_tokens_total{{{WORKER}}}"
COLD: Final = f"headwater_router_cold_workers{{{ROUTER}}}"
CACHED: Final = 'headwater_edge_cached_prompt_tokens_total{model="m"}'
INDEX: Final = f"headwater_router_index_blocks_refused{{{ROUTER}}}"
PREEMPTED: Final = f"headwater_engine_preemptions_total{{{WORKER}}}"


def _waits(le: str) -> str:
    return f'headwater_router_queue_seconds_bucket{{{ROUTER},priority="normal",le="{le}"}}'


def _appends(le: str) -> str:
    return f'headwater_log_append_seconds_bucket{{component="edge",name="edge-0",what="requests",le="{le}"}}'


HEALTHY: Final = {
    PROCESS: "1x200",
    POSITION: "0+100x200",
    READY: "2x200",
    # One restart, and a lease lost.
    EPOCH: "3x90 9x5 14x105",
    ENDED: "0+100x200",
    ERRORS: "0+1x200",
    REFUSED: "0x200",
    **{_waits(le): "0+10x200" for le in ("1", "10", "30", "+Inf")},
    STALLED: "0x200",
    **{_appends(le): "0+100x200" for le in ("0.005", "0.5", "1", "+Inf")},
    DROPPED: "0x200",
    LAG: "0x200",
    DIVERGED: "0x200",
    BREAKS: "0x200",
    BREAKS.replace("chain_breaks", "unreadable_messages"): "0x200",
    BREAKS.replace("chain_breaks", "log_gaps"): "0x200",
    TOKENS: "0+500x200",
    KV_EVENTS: "0+40x200",
    COLD: "0x200",
    f"headwater_router_predicted_cached_tokens_total{{{ROUTER}}}": "0+900x200",
    f"headwater_router_prompt_tokens_total{{{ROUTER}}}": "0+1000x200",
    CACHED: "0+850x200",
    'headwater_edge_prompt_tokens_total{model="m"}': "0+1000x200",
    INDEX: "0x200",
    PREEMPTED: "0+1x200",
    f"headwater_engine_request_seconds_count{{{WORKER}}}": "0+100x200",
}
"""A fleet that serves: nothing fires."""


NO_LABELS: Final[Mapping[str, str]] = {}


class Case(NamedTuple):
    """Series that differ from `HEALTHY`. It fires with these labels and this summary; without a summary it does not."""

    alert: str
    series: dict[str, str]
    labels: Mapping[str, str] = NO_LABELS
    summary: str = ""


OF_ROUTER: Final = {"component": "router", "name": "router-0", "instance": "r0", "pool": "p"}
OF_WORKER: Final = {"component": "worker", "name": "worker-0", "worker": "worker-0", "instance": "w0"}

CASES: Final = (
    Case(
        "HeadwaterProcessDown",
        {PROCESS: "1x100 0x100"},
        {"job": "headwater", "component": "worker", "name": "worker-0", "instance": "w0"},
        "worker worker-0 answers no scrape",
    ),
    Case("HeadwaterProcessDown", {PROCESS: "1x117 0x83"}),
    Case("HeadwaterNoRouter", {POSITION: "0+1x20 stale"}, {}, "No router reports metrics"),
    Case("HeadwaterNoRouter", {POSITION: "0+1x118 stale"}),
    Case(
        "HeadwaterNoReadyWorkers",
        {READY: "2x100 0x100"},
        {"pool": "p"},
        "Pool p has no worker that takes requests",
    ),
    Case("HeadwaterNoReadyWorkers", {READY: "2x100 1x100"}),
    Case(
        "HeadwaterWorkersRestart",
        {EPOCH: "1x80 2x5 3x5 4x5 5x5 6x100"},
        OF_WORKER,
        "Worker worker-0 began a new epoch 5 times in 15 minutes",
    ),
    Case("HeadwaterWorkersRestart", {EPOCH: "1x80 2x5 3x5 4x110"}),
    Case("HeadwaterErrors", {ERRORS: "0+5x200"}, {}, "4.762% of requests end with an error"),
    Case("HeadwaterErrors", {ERRORS: "0x200"}),
    Case("HeadwaterErrors", {ERRORS: "0x110 0+50x90"}),
    Case(
        "HeadwaterQueueRefusals",
        {REFUSED: "0+30x200"},
        {"pool": "p", "reason": "full"},
        "Pool p turns 2 requests per second away (full)",
    ),
    Case("HeadwaterQueueRefusals", {REFUSED: "0x20 30x180"}),
    Case(
        "HeadwaterQueueWaits",
        {_waits("1"): "0x200", _waits("10"): "0+5x200"},
        {"pool": "p"},
        "A tenth of the requests to p wait 26s for a worker",
    ),
    Case("HeadwaterQueueWaits", {_waits("1"): "0x200"}),
    Case(
        "HeadwaterLogStalled",
        {STALLED: "0x100 5+15x100"},
        {"component": "edge", "name": "edge-0", "what": "request log"},
        "edge edge-0 cannot write (request log)",
    ),
    Case("HeadwaterLogStalled", {STALLED: "0x119 5x80"}),
    Case(
        "HeadwaterLogSlow",
        {_appends("0.005"): "0+90x200", _appends("0.5"): "0+90x200"},
        {"what": "requests"},
        "A hundredth of the appends (requests) take 950ms",
    ),
    Case("HeadwaterLogSlow", {_appends("0.005"): "0+90x200"}),
    Case(
        "HeadwaterEventsDropped",
        {DROPPED: "0x100 40x100"},
        {"component": "edge", "name": "edge-0", "what": "requests"},
        "edge edge-0 dropped 40 events (requests)",
    ),
    Case("HeadwaterEventsDropped", {DROPPED: "7x200"}),
    Case("HeadwaterRouterLags", {LAG: "0x100 3x100"}, OF_ROUTER, "Router router-0 is 3s behind the log"),
    Case("HeadwaterRouterLags", {LAG: "0x100 1.5x100"}),
    Case("HeadwaterRouterLags", {LAG: "0x118 9x82"}),
    Case(
        "HeadwaterRoutersDiverged",
        {DIVERGED: "0x119 1x81"},
        OF_ROUTER,
        "Router router-0 has another state than 1 others",
    ),
    Case("HeadwaterRoutersDiverged", {DIVERGED: "1x20 0x180"}),
    Case(
        "HeadwaterLogDamaged",
        {BREAKS: "0x100 6x100"},
        OF_ROUTER,
        "Router router-0 found 6 missing, altered or unreadable messages",
    ),
    Case("HeadwaterLogDamaged", {BREAKS: "6x200"}),
    Case(
        "HeadwaterKvSilent",
        {KV_EVENTS: "0x200"},
        OF_WORKER,
        "Worker worker-0 generates tokens and publishes no KV events",
    ),
    Case("HeadwaterKvSilent", {KV_EVENTS: "0x200", TOKENS: "0x200"}),
    Case(
        "HeadwaterWorkersCold", {COLD: "0x100 1x100"}, {"pool": "p"}, "The cache of 1 workers of p is unknown"
    ),
    Case("HeadwaterWorkersCold", {COLD: "0x115 1x85"}),
    Case(
        "HeadwaterHitRateMispredicted",
        {CACHED: "0+400x200"},
        {},
        "Routers predict 50% more cached tokens than engines find",
    ),
    Case("HeadwaterHitRateMispredicted", {CACHED: "0+750x200"}),
    Case(
        "HeadwaterIndexFull",
        {INDEX: "0x20 7x180"},
        {"pool": "p"},
        "The index of p is full: 7 blocks are not in it",
    ),
    Case("HeadwaterIndexFull", {INDEX: "0x110 7x90"}),
    Case(
        "HeadwaterPreemptions",
        {PREEMPTED: "0+25x200"},
        {"worker": "worker-0"},
        "Worker worker-0 preempts 25% of its requests",
    ),
    Case("HeadwaterPreemptions", {PREEMPTED: "0+8x200"}),
)
