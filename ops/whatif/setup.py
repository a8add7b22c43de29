"""The setting of one column of a what-if: its fields are the options of `headwater whatif` and `tune`.

Light to import: the command line reads types, defaults and descriptions from here.
"""

from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta

from headwater.engines.limits import EMBEDDINGS_MIB
from headwater.engines.sim.defaults import (
    KV_BYTES_PER_TOKEN,
    SEQUENCES_MAX,
    STEP_TIME,
    STEP_TIME_FORMS,
    STEP_TOKENS_MAX,
    TRANSFER_GB_PER_S,
    StepTime,
)
from headwater.engines.traits import Text
from headwater.ops.config.router import read_weights, write_weights
from headwater.ops.config.setting import Choices, Flag
from headwater.ops.whatif.speed import (
    Slowdown,
    read_slowdowns,
    read_speeds,
    write_slowdowns,
    write_speeds,
)
from headwater.router.decision.names import DEFAULT_POLICY, PolicyName
from headwater.router.queue.limits import BusyLimits, Order, QueueLimits, QueueSettings
from headwater.schemas.events.route import Weights


class RoutersSetup(NamedTuple):
    """Settings of all routers of a run. Events of workers reach the log after `event_delay_ns`, and router i reads it after
    `delays_ns[i]`.

    `credit`: count blocks of routed prompts before workers report them. `agreement`: compare each decision with that of a
    single router. `kill_ns`: when the first router is killed, to return later; 0: never.
    """

    policy: str
    weights: Weights
    temperature: float
    queue: QueueSettings
    credit: bool = True
    event_delay_ns: int = 0
    delays_ns: tuple[int, ...] = (0,)
    agreement: bool = False
    kill_ns: int = 0


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

    def routing(self) -> RoutersSetup:
        """Return what its routers are made from. The delays of several routers differ, so that none agree by accident."""
        delay_ns = self.router_delay_ms * 1e6
        return RoutersSetup(
            self.policy,
            self.weights,
            self.temperature,
            QueueSettings(
                BusyLimits(self.busy_prefill_tokens, self.busy_kv, self.busy_waiting),
                QueueLimits(wait_s=self.queue_wait_s, order=self.queue_order),
            ),
            self.credit == "on",
            round(self.event_delay_ms * 1e6),
            tuple(round(delay_ns * number / self.routers) for number in range(1, self.routers + 1)),
            self.agreement,
            round(self.restart_s * 1e9),
        )

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
