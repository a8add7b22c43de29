"""Route query, decision and refusal. Decisions are events: stream pool log, kind `route`."""

from typing import Final, Literal

import msgspec

from headwater.schemas.envelope import Event
from headwater.schemas.inference import Leg

Asked = Literal["", "decode"]
"""What an edge asks for: a worker for a request, or one to go on behind a prompt computed elsewhere."""


CLIENT_POLICIES: Final = ("kv", "round_robin", "random", "power_of_two", "least_loaded", "session")
"""Policies that clients may name where nothing else is set: none of these lets one choose its worker."""


class RouteQuery(msgspec.Struct, frozen=True, array_like=True):
    """An edge asks where one request should go.

    `hashes` are the packed sequence hashes of the prompt's full blocks. `pinned` names the only worker
    allowed (other choices of one request share their prompt); `exclude` names lives of workers that just
    failed, as "<worker>.<epoch>". `needs` are capabilities that the engine must have. For `asked` "decode",
    `pairs_with` is what the worker with the KV can hand it over to. `policy` asks for another than the router's own;
    `temperature` below 0 leaves the router's. Requests of one `session` go to one worker under the policy that looks
    at it. Only workers of `tier` are asked, if it names one, and tainted ones only if all their taints are in
    `tolerates`. Where all workers are full, `priority` (lower first), `tenant` and `deadline_ms` (for the first token,
    from now; 0 for none) say who waits how long. One that `waits` may be told to wait (`RouteQueued`); any other is
    decided at once, as busy as the workers may be.
    """

    request: str
    prompt_tokens: int
    max_tokens: int
    hashes: bytes
    pinned: str = ""
    exclude: tuple[str, ...] = ()
    asked: Asked = ""
    lora_name: str = ""
    needs: tuple[str, ...] = ()
    pairs_with: str = ""
    policy: str = ""
    temperature: float = -1.0
    session: str = ""
    tier: str = ""
    tolerates: tuple[str, ...] = ()
    priority: int = 0
    tenant: str = ""
    deadline_ms: int = 0
    waits: bool = False


class Weights(msgspec.Struct, frozen=True, array_like=True):
    """What one unit of work costs in a worker's score, in blocks.

    `transfer` is what handing one block over costs, `interference` what computing one costs the requests that
    decode on the same worker; prompts of which at most `local_tokens` must be computed are never handed over.
    `lora_load` is the cost of loading an adapter that a worker does not hold. `apart`: every longer prompt goes to a
    prefill worker, whatever it costs.

    Where the time of a step is known (`estimate`), the cost is the estimated time to the first token, in milliseconds, and
    beside it `crowding` times the time to compute the prompt for each request that has to wait meanwhile, and `retain`
    times that time for the cached blocks that it pushes out; `memory` is what a full KV cache costs, in milliseconds.
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
    crowding: float = 0.25
    retain: float = 1.5
    memory: float = 100.0


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """One worker as the router saw it. Lower `score` is better.

    `cached_blocks` prompt blocks are on its GPU; `lower_blocks` more follow on a lower tier;
    `prefill_tokens` are promised to it and not computed yet; `decode_blocks` are held by its requests. It would
    do the `leg` of the request, and `loads_lora` says that it must load the adapter first. `assumed_blocks` of the cached
    ones are not announced yet. Times are estimates, 0 where nothing is known: `queue_ms` until the worker begins with this
    prompt, `prefill_ms` to compute it, `transfer_ms` to hand it over.
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


class Decision(Event, frozen=True, tag="route.decided"):
    """Where a request goes, and everything needed to decide it again.

    Made by `writer` of the batch as its `number`-th, on the fold of the log up to `position` plus its own
    decisions `seen`+1 … `number`-1, which the log did not hold yet. The prompt's hashes are kept as their
    count, the deepest one that any candidate has, the one after it and the last: the matched path itself
    is in the index. `degraded` says that the router knew it lagged behind the log. The worker does the `leg`:
    after "prefill" the edge asks again, with `asked` "decode". `assumed` are the packed hashes behind `deepest` that count as
    the worker's from now on, until it announces them or time passes. The query waited `waited_ms` at the router.
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
    pinned: str
    exclude: tuple[str, ...]
    policy: str
    weights: Weights
    seed: int
    worker: str
    epoch: int
    candidates: tuple[Candidate, ...]
    degraded: bool = False
    leg: Leg = ""
    asked: Asked = ""
    lora_name: str = ""
    needs: tuple[str, ...] = ()
    pairs_with: str = ""
    temperature: float = 0.0
    session: str = ""
    tier: str = ""
    tolerates: tuple[str, ...] = ()
    assumed: bytes = b""
    waited_ms: int = 0

    @property
    def chosen(self) -> Candidate:
        """The candidate that was taken."""
        return next(candidate for candidate in self.candidates if candidate.worker == self.worker)


class DecisionVoided(Event, frozen=True, tag="route.voided"):
    """A decision that its worker did not accept in time stops counting: the edge died in between, or was refused.

    Written by a router that saw it unaccepted for long; several may write it for one decision.
    """

    request: str
    worker: str
    epoch: int


class Shadowed(Event, frozen=True, tag="route.shadowed"):
    """What another policy would have done with a decision of the log, on the same state. Changes nothing.

    `score` is what its choice costs and `least` the least cost there was, both by the policy `judge`; `chosen_score` is
    what the decision cost by it.
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
    """No worker may take the request now; `retry_after_s` is 0 where trying again cannot help.

    `status` follows HTTP: 503, 429 where others may still send, or 400 for what can never work. `final`: the edge shall
    tell its client rather than ask again, with `code` as the error's.
    """

    reason: str
    retry_after_s: float = 0.0
    status: int = 503
    final: bool = False
    code: str = ""

    @property
    def for_good(self) -> bool:
        """Is there nothing to be gained by asking again?"""
        return self.final or self.status == 400


class RouteQueued(msgspec.Struct, frozen=True, array_like=True, tag="queued"):
    """The query waits at one life of a router, which is asked there (`RouteWait`) what has become of it."""

    router: str
    epoch: int


class RouteWait(msgspec.Struct, frozen=True, array_like=True):
    """What has become of a query that waits? The answer may take as long as the router holds questions.

    `gone`: nobody waits for it any more; no answer is needed.
    """

    request: str
    gone: bool = False


RouteReply = Decision | RouteRefused | RouteQueued
