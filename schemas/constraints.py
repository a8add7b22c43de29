"""Constraints, preferences and flow control: which workers may take a request, how one is picked, and how the request may be queued.

Each struct travels whole: from HTTP headers into the route query, into the decision's record, and back when a decision is
recomputed. Code outside this module names a field only where its value is set or used, so that a new constraint needs a field
here, the place that sets it, and a filter (docs/guides/add-a-routing-constraint.md).

The structs are on the wire by position: append fields, with defaults that mean "no constraint", and never reorder them.
"""

from typing import Final, Literal

import msgspec

RequestedLeg = Literal["", "decode"]
"""The leg that a query asks for: any, or only decoding a prompt that another worker computed."""

CLIENT_POLICIES: Final = (
    "kv",
    "slo",
    "lmetric",
    "round_robin",
    "random",
    "power_of_two",
    "least_loaded",
    "session",
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
