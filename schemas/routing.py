"""Routing: the names of policies, constraints and preferences, the route query, the decision or refusal, and state digests.

Decisions are events: stream pool log, kind `route`.

Constraints, preferences and flow control say which workers may take a request, how one is picked, and how the request may be queued.
Each of these structs travels whole: from HTTP headers into the route query, into the decision's record, and back when a decision is
recomputed. Code outside this module names a field only where its value is set or used, so that a new constraint needs a field
here, the place that sets it, and a filter (docs/guides/add-a-routing-constraint.md).

The structs are on the wire by position: append fields, with defaults that mean "no constraint", and never reorder them.
"""

from typing import Final, Literal, get_args

import msgspec

from headwater.schemas.events import Event
from headwater.schemas.inference import Leg

PolicyName = Literal[
    "kv", "slo", "lmetric", "round_robin", "random", "power_of_two", "least_loaded", "session", "direct"
]

DEFAULT_POLICY: Final[PolicyName] = "kv"


RequestedLeg = Literal["", "decode"]
"""The leg that a query asks for: any, or only decoding a prompt that another worker computed."""

CLIENT_POLICIES: Final[tuple[PolicyName, ...]] = tuple(
    [name for name in get_args(PolicyName) if name != "direct"]
)
"""Policies that clients may request by default: none of these lets a client choose its worker."""


class Constraints(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """The properties of a request that limit which workers may take it. Requests with equal constraints can be placed on the same workers.

    `pinned` is the only worker allowed. `exclude` lists incarnations to leave out, as "<worker>.<epoch>": those that just failed
    the request, and saturated ones. `leg` "decode" requires a worker that can continue a prompt computed elsewhere, by a hand-off
    of the kind `pairs_with`; with the need "encode" that is the format of embeddings. `needs` are capabilities that the engine
    must have, `tier` the only tier allowed. A tainted worker is allowed only if `tolerates` has all its taints. `engine` is the
    only engine allowed, whatever the engine weights are. `tokenizer` is the digest of the tokenizer that the tokens so far are
    of, `media_processor` that of the settings which the ids of its media stand for. `revision` is the only revision of workers
    allowed, whatever the traffic split is.
    """

    pinned: str = ""
    exclude: tuple[str, ...] = ()
    leg: RequestedLeg = ""
    lora_name: str = ""
    needs: tuple[str, ...] = ()
    pairs_with: str = ""
    tier: str = ""
    tolerates: tuple[str, ...] = ()
    engine: str = ""
    tokenizer: str = ""
    media_processor: str = ""
    revision: str = ""


class Preferences(msgspec.Struct, frozen=True, array_like=True):
    """How one of the allowed workers is picked.

    An empty `policy` and a negative `temperature` select the router's own. Requests of one `session` go to one worker under
    the policy `session`; other policies ignore it. Engine weights and traffic splits draw the same for all requests of a session,
    under any policy, and for those without one by `conversation`, a digest of how their conversation begins.
    """

    policy: str = ""
    temperature: float = -1.0
    session: str = ""
    conversation: str = ""


class FlowControl(msgspec.Struct, frozen=True, array_like=True):
    """How a query is queued while every worker that may take it is saturated.

    Lower `priority` is served first; within a priority, tenants share. `deadline_ms` is the time left for the first token; 0 for none.
    A query that may not wait (`waits`) is decided at once, saturated workers included.
    """

    priority: int = 0
    tenant: str = ""
    deadline_ms: int = 0
    waits: bool = False


NO_CONSTRAINTS: Final = Constraints()
NO_PREFERENCES: Final = Preferences()
NO_FLOW_CONTROL: Final = FlowControl()


class RouteQuery(msgspec.Struct, frozen=True, array_like=True):
    """An edge's request for a worker. `hashes` are the packed block hashes of the prompt's full blocks.

    Of an image, `reader` is the worker that is going to read the embedding. `trace` is the client's trace id, "" if it sent none.
    """

    request: str
    prompt_tokens: int
    max_tokens: int
    hashes: bytes
    constraints: Constraints = NO_CONSTRAINTS
    preferences: Preferences = NO_PREFERENCES
    flow: FlowControl = NO_FLOW_CONTROL
    reader: str = ""
    trace: str = ""


class Weights(msgspec.Struct, frozen=True, array_like=True):
    """Weights of a worker's cost (`router.cost`), relative to computing one block.

    `prefill` and `decode` weigh prompt blocks to compute and KV blocks held, `lower_tier` loading a block from a lower tier,
    `transfer` moving a block between workers, `interference` the delay that computing one causes to requests decoding on the
    same worker, and `lora_load` loading a LoRA adapter. Prompts with at most `local_tokens` uncached tokens are prefilled
    where they are decoded; with `apart`, all longer ones go to a prefill worker regardless of cost.

    With `estimate`, and once step times are known, the cost is in milliseconds: the time to the first token, plus `crowding`
    times the prompt's prefill time for each running request that it delays (up to 1 + `crowding_spare` times that where workers
    are idle), plus the wait of requests that arrive later, of which a worker with work gets `arrivals` per second, plus `memory`
    times the share of the KV cache in use, plus `queued` times the time that the prompt adds to a step for each prompt that is
    routed to the worker and not computed: it may be computed in the same step.

    `ttft_limit_ms` and `itl_limit_ms` are no weights but the limits of the policy `slo`: milliseconds to the first token, and between two.
    """

    prefill: float = 1.0
    decode: float = 1.0
    lower_tier: float = 0.25
    transfer: float = 0.1
    interference: float = 1.0
    local_tokens: int = 256
    lora_load: float = 64.0
    apart: bool = False
    estimate: bool = True
    crowding: float = 0.1
    memory: float = 100.0
    ttft_limit_ms: float = 500.0
    itl_limit_ms: float = 25.0
    arrivals: float = 5.0
    queued: float = 0.5
    crowding_spare: float = 9.0


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """One worker as the router scored it. Lower `score` is better.

    `cached_blocks` leading blocks of the prompt are on its GPU (`assumed_blocks` of them are credit, not announced yet);
    `lower_blocks` more are on a lower tier. `prefill_tokens` were routed to it and are not computed yet;
    `decode_blocks` are held by its requests. It would do the `leg` of the request, and must load the LoRA adapter first if
    `loads_lora`. Times are estimates, 0 if unknown: `queue_ms` until the worker starts this prompt, `prefill_ms` to
    compute it, `transfer_ms` to transfer its KV; `itl_ms` between two tokens with this request among those it runs. For a prefill leg, `itl_ms`
    is that of the decode worker whose cost the candidate includes.
    """

    worker: str
    epoch: int
    cached_blocks: int
    lower_blocks: int
    prefill_tokens: int
    decode_blocks: int
    requests: int
    score: float
    leg: Leg = ""
    loads_lora: bool = False
    assumed_blocks: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    itl_ms: float = 0.0

    @property
    def ttft_ms(self) -> float:
        """Estimated milliseconds from the decision to the first token."""
        return self.queue_ms + self.prefill_ms + self.transfer_ms


class Draw(msgspec.Struct, frozen=True, array_like=True):
    """How weights selected one of several for a request: the engine, the revision of its worker, or the routing policy.

    `weights` are (name, weight), by name. `drawn` is the one that the session selects, or else the conversation, or else the
    seed. `used` differs only where `drawn` is of no use for the request, for `reason`.
    """

    weights: tuple[tuple[str, float], ...]
    drawn: str
    used: str
    reason: str = ""


class EncodeEstimate(msgspec.Struct, frozen=True, array_like=True):
    """What an image is expected to take on the chosen encode worker, and on the worker `reader` if that encodes it itself.

    Milliseconds: `queue_ms` until the encode worker starts with it, `encode_ms` to encode it there (0: its embedding is there),
    `token_ms` for a token of those ahead of it, `read_ms` to read the embedding, `here_ms` to encode it on the reader. Without
    measurements of either, all are 0.
    """

    reader: str
    queue_ms: float = 0.0
    encode_ms: float = 0.0
    token_ms: float = 0.0
    read_ms: float = 0.0
    here_ms: float = 0.0


class Decision(Event, frozen=True, tag="route.decided"):
    """The record of one routing choice: the worker that a request goes to, and everything needed to recompute the choice.

    It is decision `number` of the batch's `writer`, made on the fold of the log up to `position` plus the writer's own decisions
    `seen`+1 … `number`-1, which the log did not hold yet. `constraints` are the query's, with saturated workers added to `exclude`;
    `preferences` hold the policy and temperature that were used. Of the prompt's block hashes the record keeps their
    count, the deepest one that any worker has (0: none), the one after it (`following`) and the last; the matched path is
    in the index. `assumed` packs the hashes after `deepest` that are credited to the worker until it announces them or
    the request ends. `degraded`: the router knew that it lagged behind the log. The worker does the `leg`; after
    "prefill" the edge sends a query for the "decode" leg, with `pairs_with` as its constraint. The query waited `waited_ms` in
    the admission queue. With a `draw`, the policy picked among the candidates of the engine that it `used`, and with a
    `revision_draw` among those of its revision. A `policy_draw` selected the policy. `revision` is that of the worker.

    `algorithm` is the version of the router's decision algorithm. `scored` candidates were compared, `digest` is one of the costs
    of all, and `candidates` are those that explain the choice, in order of their names: of a small fleet all, else the chosen
    one, the cheapest, the fastest, and the one that holds most of the prompt. `excluded` are bits of the workers, in order of
    their names, that `exclude` had if it had too many for this record. The answer is expected to have `output_tokens` tokens,
    with the standard deviation `output_deviation`. `tenant` is a digest of the query's tenant, 0 without one: the log names no
    tenants. For an image, `encoding` is what its encoding is expected to take. `spare` is how idle the workers were that passed
    the filters, from 0 to 1.
    """

    number: int
    position: int
    seen: int
    wall_ns: int
    request: str
    prompt_tokens: int
    max_tokens: int
    blocks: int
    deepest: int
    following: int
    last: int
    constraints: Constraints
    preferences: Preferences
    weights: Weights
    seed: int
    worker: str
    epoch: int
    candidates: tuple[Candidate, ...]
    degraded: bool = False
    leg: Leg = ""
    pairs_with: str = ""
    assumed: bytes = b""
    waited_ms: int = 0
    draw: Draw | None = None
    algorithm: int = 1
    scored: int = 0
    digest: bytes = b""
    excluded: bytes = b""
    output_tokens: int = 0
    encoding: EncodeEstimate | None = None
    output_deviation: int = 0
    tenant: int = 0
    spare: float = 0.0
    revision: str = ""
    revision_draw: Draw | None = None
    policy_draw: Draw | None = None

    @property
    def chosen(self) -> Candidate:
        """The candidate of the chosen worker."""
        return next(candidate for candidate in self.candidates if candidate.worker == self.worker)

    def e2e_ms(self, candidate: Candidate) -> float:
        """Estimated milliseconds from the decision to the last token on that worker: TTFT + (output tokens - 1) × ITL.

        0 if one of them is unknown. Of a decode leg, from its own decision on.
        """
        if not candidate.itl_ms or not (candidate.prefill_ms or candidate.leg == "decode"):
            return 0.0
        return candidate.ttft_ms + max(0, self.output_tokens - 1) * candidate.itl_ms


class DecisionVoided(Event, frozen=True, tag="route.voided"):
    """A decision stops counting, because its worker did not accept it in time: the edge died, or was refused.

    Written by routers that observed it unaccepted for long; several may write it for one decision.
    """

    request: str
    worker: str
    epoch: int


class Shadowed(Event, frozen=True, tag="route.shadowed"):
    """A shadow policy's choice for a decision of the log, on the same state. Folds ignore it.

    By the costs of the policy `judge`: `score` is that of the shadow's choice, `chosen_score` that of the decision, and `least`
    the lowest of all candidates.
    """

    request: str
    policy: str
    worker: str
    chosen: str
    judge: str
    score: float
    chosen_score: float
    least: float


class RouteRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """No worker may take the request now; `retry_after_s` is 0 if a retry cannot help.

    `status` follows HTTP: 503, 429 if other tenants may still send, or 400 for a request that can never be served. `final`: the
    edge must return the error to its client, with this `code`, instead of retrying.
    """

    reason: str
    retry_after_s: float = 0.0
    status: int = 503
    final: bool = False
    code: str = ""

    @property
    def for_good(self) -> bool:
        """Is a retry by the edge pointless?"""
        return self.final or self.status == 400


class RouteQueued(msgspec.Struct, frozen=True, array_like=True, tag="queued"):
    """The query waits in the queue of a router's incarnation, which answers polls (`RouteWait`) for it."""

    router: str
    epoch: int


class RouteWait(msgspec.Struct, frozen=True, array_like=True):
    """A poll for a queued query. The router replies as soon as there is an outcome, or when its poll period ends.

    `gone`: the client is gone; the query is discarded, and no reply is needed.
    """

    request: str
    gone: bool = False


RouteReply = Decision | RouteRefused | RouteQueued


# State digests that a pool's routers exchange: folds of one log must have equal states.


class StateDigest(msgspec.Struct, frozen=True, array_like=True):
    """The digest of a router's fold of the log named `log` at a position, without its own undelivered decisions.

    Folds are comparable if they are of one `release` and started at the same position: `since` is the first position
    of a fold that restarted after a gap, 0 for a fold of the whole log.
    """

    router: str
    epoch: int
    release: str
    log: str
    since: int
    position: int
    digest: str

    @property
    def terms(self) -> tuple[str, str, int]:
        """The terms of comparison: only digests that are equal in these are comparable."""
        return self.release, self.log, self.since
