"""Route query, decision and refusal. Decisions are events: stream pool log, kind `route`."""

from typing import Literal

import msgspec

from headwater.schemas.envelope import Event
from headwater.schemas.inference import Leg

Asked = Literal["", "decode"]
"""What an edge asks for: a worker for a request, or one to go on behind a prompt computed elsewhere."""


class RouteQuery(msgspec.Struct, frozen=True, array_like=True):
    """An edge asks where one request should go.

    `hashes` are the packed sequence hashes of the prompt's full blocks. `pinned` names the only worker
    allowed (other choices of one request share their prompt); `exclude` names lives of workers that just
    failed, as "<worker>.<epoch>". `needs` are capabilities that the engine must have. For `asked` "decode",
    `pairs_with` is what the worker with the KV can hand it over to.
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


class Weights(msgspec.Struct, frozen=True, array_like=True):
    """What one unit of work costs in a worker's score, in blocks.

    `transfer` is what handing one block over costs, `interference` what computing one costs the requests that
    decode on the same worker; prompts of which at most `local_tokens` must be computed are never handed over.
    `lora_load` is the cost of loading an adapter that a worker does not hold. `apart`: every longer prompt goes to a
    prefill worker, whatever it costs.
    """

    prefill: float = 1.0
    decode: float = 1.0
    lower_tier: float = 0.25
    transfer: float = 0.1
    interference: float = 1.0
    local_tokens: int = 256
    lora_load: float = 64.0
    apart: bool = False


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """One worker as the router saw it. Lower `score` is better.

    `cached_blocks` prompt blocks are on its GPU; `lower_blocks` more follow on a lower tier;
    `prefill_tokens` are promised to it and not computed yet; `decode_blocks` are held by its requests. It would
    do the `leg` of the request, and `loads_lora` says that it must load the adapter first.
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


class Decision(Event, frozen=True, tag="route.decided"):
    """Where a request goes, and everything needed to decide it again.

    Made by `writer` of the batch as its `number`-th, on the fold of the log up to `position` plus its own
    decisions `seen`+1 … `number`-1, which the log did not hold yet. The prompt's hashes are kept as their
    count, the deepest one that any candidate has, the one after it and the last: the matched path itself
    is in the index. `degraded` says that the router knew it lagged behind the log. The worker does the `leg`:
    after "prefill" the edge asks again, with `asked` "decode".
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


class RouteRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """No worker may take the request now; `retry_after_s` is 0 where trying again cannot help."""

    reason: str
    retry_after_s: float = 0.0


RouteReply = Decision | RouteRefused
