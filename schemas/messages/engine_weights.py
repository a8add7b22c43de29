"""An operator's command about the engine weights of a pool. Core NATS; a router answers, and its event is the audit."""

import msgspec

from headwater.schemas.messages.control import ControlReply


class WeightsRequest(msgspec.Struct, frozen=True, array_like=True):
    """New engine weights, {} to remove them, or None to show the present ones. `by` says who asks, for the audit."""

    weights: dict[str, float] | None = None
    by: str = ""


class EngineStatus(msgspec.Struct, frozen=True):
    """An engine of a pool. `ready` of its `workers` take requests; `requests` of them are in flight."""

    engine: str
    weight: float | None
    """None: no weights are set. An engine without one, where others have weights, has 0."""
    workers: int
    ready: int
    requests: int


class WeightsReply(msgspec.Struct, frozen=True, array_like=True):
    """The engines as the router knows them after the command, by name. `reply` says what was done, or why not."""

    reply: ControlReply
    engines: tuple[EngineStatus, ...] = ()
