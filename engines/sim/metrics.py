"""The simulated engine's own metrics, as other engines have theirs: made when the first engine of a process is."""

from functools import cache
from typing import Final

import msgspec
from prometheus_client import Counter, Histogram

BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class SimMetrics:
    """The metrics of all simulated engines of a process."""

    def __init__(self) -> None:
        self.prompt_tokens = Counter("sim_prompt_tokens", "Prompt tokens of requests that began")
        self.cached_tokens = Counter("sim_cached_tokens", "Those of them that were cached")
        self.generated_tokens = Counter("sim_generated_tokens", "Tokens generated")
        self.preemptions = Counter("sim_preemptions", "Sequences preempted")
        self.queue_seconds = Histogram("sim_queue_seconds", "Arrival to first step", buckets=BUCKETS)
        self.first_token_seconds = Histogram(
            "sim_first_token_seconds", "Arrival to first token", buckets=BUCKETS
        )
        self.token_seconds = Histogram(
            "sim_token_seconds", "First token to end, by the tokens after the first", buckets=BUCKETS
        )
        self.request_seconds = Histogram("sim_request_seconds", "Arrival to end", buckets=BUCKETS)


@cache
def sim_metrics() -> SimMetrics:
    """The metrics of this process, which may be registered once."""
    return SimMetrics()


class SequenceTimes(msgspec.Struct):
    """Times of one sequence by the engine's clock; 0: not yet."""

    arrived_s: float
    began_s: float = 0.0
    first_token_s: float = 0.0

    def begin(self, now_s: float, prompt_tokens: int, cached_tokens: int) -> None:
        """It runs for the first time, with so many tokens of its prompt cached. A call after that does nothing."""
        if self.began_s:
            return
        metrics, self.began_s = sim_metrics(), now_s
        metrics.queue_seconds.observe(now_s - self.arrived_s)
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.cached_tokens.inc(cached_tokens)

    def generate(self, now_s: float, tokens: int) -> None:
        """It generated tokens."""
        sim_metrics().generated_tokens.inc(tokens)
        if not self.first_token_s:
            self.first_token_s = now_s
            sim_metrics().first_token_seconds.observe(now_s - self.arrived_s)

    def end(self, now_s: float, produced: int) -> None:
        """It ended well after so many tokens."""
        sim_metrics().request_seconds.observe(now_s - self.arrived_s)
        if produced > 1:
            sim_metrics().token_seconds.observe((now_s - self.first_token_s) / (produced - 1))
