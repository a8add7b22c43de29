"""Metrics of engines under one set of names, next to their own.

Each engine's `TRAITS.metrics` says which of its metrics is which of these. A process of a worker shows both (`headwater.ops.process.metrics`). An engine
of another package exports these names itself.
"""

from typing import Final, Literal, NamedTuple

PREFIX: Final = "headwater_engine_"


class EngineMetric(NamedTuple):
    """One of the common metrics: its name without the prefix and without `_total`."""

    name: str
    kind: Literal["counter", "histogram"]
    help: str


COMMON: Final = (
    EngineMetric("prompt_tokens", "counter", "Prompt tokens of requests, by the engine's own count"),
    EngineMetric("cached_prompt_tokens", "counter", "Those of them that it had cached"),
    EngineMetric("generated_tokens", "counter", "Tokens that it generated"),
    EngineMetric("preemptions", "counter", "Requests preempted for lack of KV blocks (SGLang: retracted)"),
    EngineMetric("queue_seconds", "histogram", "From a request's arrival in the engine until it first runs"),
    EngineMetric(
        "time_to_first_token_seconds",
        "histogram",
        "From a request's arrival in the engine to its first token",
    ),
    EngineMetric(
        "time_per_output_token_seconds",
        "histogram",
        "First token to end of a request, divided by the tokens after the first",
    ),
    EngineMetric("request_seconds", "histogram", "From a request's arrival in the engine to its end"),
)

FROM_LOAD: Final = {
    "running": (PREFIX + "running_requests", "Requests running in the engine"),
    "waiting": (PREFIX + "waiting_requests", "Requests waiting in the engine"),
    "used_blocks": (PREFIX + "used_blocks", "KV blocks in use"),
    "total_blocks": (PREFIX + "total_blocks", "KV blocks in total"),
}
"""(name, help) of what a worker reads of every engine (`Engine.load`), by its statistic."""
