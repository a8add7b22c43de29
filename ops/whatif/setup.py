"""Options of `headwater whatif` and `tune`: the setting of one column, the speed of each worker and when it changes, the output, and how to search.

Light to import: the command line reads types, defaults and descriptions from here.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta

from headwater.engines.sim import (
    KV_BYTES_PER_TOKEN,
    SEQUENCES_MAX,
    STEP_TIME,
    STEP_TIME_FORMS,
    STEP_TOKENS_MAX,
    TRANSFER_GB_PER_S,
    StepTime,
)
from headwater.engines.traits import EMBEDDINGS_MIB, Text
from headwater.ops.config.sections import read_weights, write_weights
from headwater.ops.config.setting import Choices, ConfigError, Flag
from headwater.router.queue import BusyLimits, Order, QueueLimits, QueueSettings
from headwater.schemas.routing import DEFAULT_POLICY, PolicyName, Weights


class Slowdown(NamedTuple):
    """A slowdown: from `at_s` of virtual time on, each step of a worker takes `factor` times as long as at its own speed."""

    worker: str
    at_s: float
    factor: float

    def __str__(self) -> str:
        """Return the slowdown as the command line spells it."""
        return f"{self.worker}@{self.at_s:g}={self.factor:g}"


class SpeedProfile(NamedTuple):
    """A worker's speed: `base` at first, and others later. `changes`: (nanoseconds, speed from then on), ascending.

    A worker of speed 1 needs the step times of the setup, one of speed 2 half of them.
    """

    base: float = 1.0
    changes: tuple[tuple[int, float], ...] = ()

    def at(self, now_ns: int) -> float:
        """The speed of a step that begins now."""
        speed = self.base
        for from_ns, later in self.changes:
            if from_ns > now_ns:
                break
            speed = later
        return speed

    def steps_until_change(self, now_ns: int, step_ns: int, steps: int) -> int:
        """Return how many of `steps` equal steps from now on begin before the speed changes, at least 1."""
        for from_ns, _ in self.changes:
            if from_ns > now_ns:
                return min(steps, -(-(from_ns - now_ns) // step_ns))
        return steps


def profile_of(name: str, base: float, slowdowns: Sequence[Slowdown]) -> SpeedProfile:
    """The speed of a worker over time."""
    changes = sorted(
        (round(slowdown.at_s * 1e9), base / slowdown.factor)
        for slowdown in slowdowns
        if slowdown.worker == name
    )
    return SpeedProfile(base, tuple(changes))


def check_workers(slowdowns: Sequence[Slowdown], names: Sequence[str]) -> None:
    """Raises `ConfigError` for a slowdown of a worker that the fleet does not have."""
    for slowdown in slowdowns:
        if slowdown.worker not in names:
            raise ConfigError(
                f"--slowdowns {slowdown}: the fleet has no worker {slowdown.worker}; its workers are {names[0]} to {names[-1]}"
            )


def read_speeds(text: str) -> tuple[float, ...]:
    """Speeds separated by commas. Raises `ValueError`."""
    speeds = tuple(map(float, text.split(",")))
    if min(speeds) <= 0:
        raise ValueError("a speed is greater than 0")
    return speeds


def write_speeds(speeds: Sequence[float]) -> str:
    """Return the speeds in the form that `read_speeds` reads."""
    return ",".join(f"{speed:g}" for speed in speeds)


def read_slowdowns(text: str) -> tuple[Slowdown, ...]:
    """Slowdowns such as `w000@60=4`, separated by commas; none for an empty text. Raises `ValueError`."""
    return tuple(map(_read_slowdown, text.split(","))) if text else ()


def _read_slowdown(text: str) -> Slowdown:
    worker, at, rest = text.strip().partition("@")
    at_s, equals, factor = rest.partition("=")
    try:
        slowdown = Slowdown(worker, float(at_s), float(factor))
    except ValueError:
        slowdown = None
    if not (worker and at and equals and slowdown) or slowdown.at_s < 0 or slowdown.factor <= 0:
        raise ValueError(
            f"{text.strip()!r} is no WORKER@SECONDS=FACTOR with seconds from 0 and a factor above 0"
        )
    return slowdown


def write_slowdowns(slowdowns: Sequence[Slowdown]) -> str:
    """Return the slowdowns in the form that `read_slowdowns` reads."""
    return ",".join(map(str, slowdowns))


# One column.

EMBEDDING_BYTES_PER_TOKEN: Final = 7_168
"""Bytes of an image's embedding for an 8B-class model: 3,584 values of 16 bits per token."""


class Setup(msgspec.Struct, frozen=True):
    """One column.

    `temperature` below 0 leaves the router's. `requests`: only this many of the trace's first ones; 0: all. `skip` False
    simulates every step by itself; the results are the same. `agreement`: compare each decision with a single router's.
    `restart_s`: kill the first of several routers at this time, and let it return (0: never).
    """

    policy: Annotated[str, Choices(get_args(PolicyName)), Meta(description="routing policy")] = DEFAULT_POLICY
    workers: Annotated[
        int,
        Meta(
            ge=0,
            description="aggregated workers (0 if --prefill-workers or --decode-workers is given without --workers)",
        ),
    ] = 8
    prefill_workers: Annotated[int, Meta(ge=0, description="prefill-only workers")] = 0
    decode_workers: Annotated[int, Meta(ge=0, description="decode-only workers")] = 0
    encode_workers: Annotated[
        int, Meta(ge=0, description="workers that only encode media for the others")
    ] = 0
    encode_routing: Annotated[
        Literal["router", "round_robin"],
        Meta(
            description="who chooses the encode worker of an image: the router, which knows their embeddings, or each in turn"
        ),
    ] = "router"
    embeddings_mib: Annotated[
        int,
        Meta(
            ge=1,
            description="MiB of image embeddings that a worker keeps, of 7,168 bytes per token of an image",
        ),
    ] = EMBEDDINGS_MIB
    blocks: Annotated[int, Meta(ge=1, description="KV blocks per worker")] = 4_000
    block_size: Annotated[int, Meta(ge=1, description="tokens per KV block")] = 512
    speed: Annotated[float, Meta(gt=0, description="divisor of the arrival times")] = 1.0
    weights: Annotated[
        Weights,
        Flag("routing-weights"),
        Text(read_weights, write_weights, "NAME=VALUE,…", dict[str, Any]),
        Meta(description="cost weights that differ from the router's defaults"),
    ] = Weights()
    temperature: Annotated[
        float,
        Flag("router-temperature"),
        Meta(ge=0, description="temperature of the choice between workers (default: the router's)"),
    ] = -1.0
    step_time: Annotated[
        StepTime,
        STEP_TIME,
        Meta(description=STEP_TIME_FORMS),
    ] = StepTime()
    worker_speeds: Annotated[
        tuple[float, ...],
        Text(read_speeds, write_speeds, "X,…", Any),
        Meta(
            description="speeds of the workers of each role, repeated over them: with 1,0.5 every second worker needs twice "
            "the step times"
        ),
    ] = (1.0,)
    slowdowns: Annotated[
        tuple[Slowdown, ...],
        Text(read_slowdowns, write_slowdowns, "WORKER@SECONDS=FACTOR,…", Any),
        Meta(
            description="workers that turn slow: from then on their steps take this many times as long as before the first "
            "slowdown; a later factor of 1 ends it"
        ),
    ] = ()
    step_tokens: Annotated[
        int, Meta(ge=1, description="maximum tokens that a worker computes in one step")
    ] = STEP_TOKENS_MAX
    sequences: Annotated[int, Meta(ge=1, description="maximum requests that a worker runs concurrently")] = (
        SEQUENCES_MAX
    )
    kv_bytes_per_token: Annotated[
        int,
        Meta(
            ge=1, description="KV bytes of one token, which a KV transfer copies (default: an 8B-class model)"
        ),
    ] = KV_BYTES_PER_TOKEN
    transfer_gb_per_s: Annotated[float, Meta(gt=0, description="bandwidth of one KV transfer, GB/s")] = (
        TRANSFER_GB_PER_S
    )
    busy_prefill_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="a worker is saturated above this many prompt tokens to compute; 0: no limit, and the default of "
            "policies other than kv",
        ),
    ] = BusyLimits().prefill_tokens
    busy_kv: Annotated[
        float,
        Meta(ge=0, description="a worker is saturated above this share of its KV blocks in use; 0: no limit"),
    ] = BusyLimits().kv
    busy_waiting: Annotated[
        int,
        Meta(ge=0, description="a worker is saturated above this many requests waiting in it; 0: no limit"),
    ] = BusyLimits().waiting
    queue_order: Annotated[Order, Meta(description="order in the router's queue")] = QueueLimits().order
    queue_wait_s: Annotated[
        float, Meta(gt=0, description="maximum time that a request is queued at the router, in seconds")
    ] = QueueLimits().wait_s
    event_delay_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="time from an event of a worker (KV blocks, load) until the log has it, in milliseconds",
        ),
    ] = 0.0
    credit: Annotated[
        Literal["on", "off"],
        Meta(description="count blocks of routed prompts as a worker's before it reports them"),
    ] = "on"
    routers: Annotated[
        int, Meta(ge=1, description="routers that fold one log; requests are spread over them at random")
    ] = 1
    router_delay_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="time from storing a message until the last router has folded it, in milliseconds; the first of N "
            "needs 1/N of it",
        ),
    ] = 0.0
    requests: int = 0
    skip: bool = True
    agreement: bool = False
    restart_s: float = 0.0

    @property
    def queue(self) -> QueueSettings:
        """Saturation limits of the workers, and bounds of each router's queue."""
        return QueueSettings(
            BusyLimits(self.busy_prefill_tokens, self.busy_kv, self.busy_waiting),
            QueueLimits(wait_s=self.queue_wait_s, order=self.queue_order),
        )

    @property
    def event_delay_ns(self) -> int:
        """Time from an event of a worker until the log has it."""
        return round(self.event_delay_ms * 1e6)

    @property
    def router_delays_ns(self) -> tuple[int, ...]:
        """Time from storing a message until each router reads it. The delays of several differ, so that none agree by accident."""
        delay_ns = self.router_delay_ms * 1e6
        return tuple(round(delay_ns * number / self.routers) for number in range(1, self.routers + 1))

    @property
    def embedding_tokens(self) -> int:
        """Tokens of images whose embeddings a worker keeps."""
        return (self.embeddings_mib << 20) // EMBEDDING_BYTES_PER_TOKEN

    def encode_ns(self, tokens: int) -> int:
        """Duration of encoding one image of this many tokens."""
        return round(self.step_time.encode_seconds([tokens]) * 1e9)

    def embedding_ns(self, tokens: int) -> int:
        """Duration of the transfer of an image's embedding."""
        return round(tokens * EMBEDDING_BYTES_PER_TOKEN / self.transfer_gb_per_s)

    def transfer_ns(self, tokens: int) -> int:
        """Duration of a KV transfer of this many tokens."""
        return round(tokens * self.kv_bytes_per_token / self.transfer_gb_per_s)


# Options besides the columns.

Objective = Literal["ttft_mean", "ttft_p50", "ttft_p99", "itl_mean", "e2e_mean", "reuse"]


class Runs(NamedTuple):
    """The requests that are simulated, and how."""

    requests: Annotated[int, Meta(ge=0, description="only the first N requests; 0: all")] = 0
    jobs: Annotated[int, Meta(ge=1, description="columns simulated in parallel")] = 1
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON")] = False


class Search(NamedTuple):
    """How `headwater tune` searches."""

    objective: Annotated[Objective, Meta(description="figure to improve")] = "ttft_mean"
    names: Annotated[tuple[str, ...], Flag("search"), Meta(description="weights to search")] = (
        "crowding",
        "queued",
        "arrivals",
        "memory",
    )
    trials: Annotated[int, Meta(ge=1, description="number of runs")] = 40
    seed: Annotated[int, Meta(description="seed of the search")] = 0
    share: Annotated[
        float,
        Meta(
            ge=0.1,
            le=0.9,
            description="share of the requests to search on, the first ones; the rest evaluate",
        ),
    ] = 0.6
    guard: Annotated[
        float, Meta(ge=0, description="by which share each other latency figure may get worse")
    ] = 0.02
