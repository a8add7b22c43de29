"""Control commands to one worker, and commands about the traffic splits of a pool to its routers, with their replies.

They travel over core NATS. A worker's are audited in the pool log; a router answers those about splits, and its event is the audit.
"""

from typing import Any, Literal

import msgspec

from headwater.schemas.events import SplitSubject, TrafficSplit

Command = Literal[
    "status",
    "sleep",
    "wake",
    "clear-kv",
    "pause",
    "resume",
    "drain",
    "profile-start",
    "profile-stop",
    "role",
    "load-lora",
    "unload-lora",
    "list-loras",
    "taint",
    "untaint",
    "stop",
]

COMMANDS: dict[Command, str] = {
    "status": "show state, role, load and LoRA adapters",
    "sleep": "release GPU memory: level 1 keeps the weights in host memory, level 2 discards them",
    "wake": "allocate the memory again and serve",
    "clear-kv": "drop all cached blocks that no request uses",
    "pause": "stop generating; mode abort, wait or keep decides about running requests",
    "resume": "serve again after a pause or a drain",
    "drain": "accept no requests and finish those in flight; the worker stays in the fleet",
    "profile-start": "start a profile of the engine",
    "profile-stop": "end the profile and write it",
    "role": "change the role to both, prefill or decode; the worker must be drained",
    "load-lora": "load a LoRA adapter: its name and its source",
    "unload-lora": "unload a LoRA adapter",
    "list-loras": "list the loaded LoRA adapters",
    "taint": "keep away requests that do not tolerate this taint; those in flight continue",
    "untaint": "remove a taint",
    "stop": "drain, leave the fleet and exit",
}
"""One line per command, for help texts."""


class ControlRequest(msgspec.Struct, frozen=True, array_like=True):
    """`arguments` are plain JSON types; `by` says who asks, for the audit."""

    command: Command
    arguments: dict[str, Any] = {}
    by: str = ""


class ControlReply(msgspec.Struct, frozen=True, array_like=True):
    """`detail` says what was done, or why not; `data` is the command's result, plain JSON types.

    `status` follows HTTP: 200 done, 202 in progress (`data` has a ticket, and the status command reports the result),
    400 wrong arguments, 404 not found, 409 not possible in this state, 500 the worker failed, 501 not supported by
    this engine, 502 the engine failed, 504 timeout.
    """

    status: int
    detail: str
    data: dict[str, Any] = {}


# Commands about the engine weights of a pool. A router answers, and its event is the audit.


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


# Commands about the traffic splits of a pool.


class SplitRequest(msgspec.Struct, frozen=True, array_like=True):
    """A new split of a pool's requests by this `subject`, or None to show the present one."""

    subject: SplitSubject
    split: TrafficSplit | None = None


class ShareStatus(msgspec.Struct, frozen=True):
    """A revision of a pool's workers, or a policy. `ready` of its `workers` take requests; `requests` of them are in flight."""

    name: str
    share: float | None
    """None: it has none, or there is no split."""
    workers: int = 0
    ready: int = 0
    requests: int = 0


class SplitReply(msgspec.Struct, frozen=True, array_like=True):
    """The split as the router knows it after the command. `reply` says what was done, or why not (409: another one came first).

    The pool's log stored the `split` at `position`, at `since_ns` of the server's clock; 0 without any. `default` is the policy
    of queries that state none and draw none, "" for revisions.
    """

    reply: ControlReply
    position: int = 0
    since_ns: int = 0
    split: TrafficSplit | None = None
    members: tuple[ShareStatus, ...] = ()
    default: str = ""
