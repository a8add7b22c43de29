"""Commands about the traffic splits of a pool, and their replies. Core NATS; a router answers, and its event is the audit."""

import msgspec

from headwater.schemas.events.fleet import SplitSubject, TrafficSplit
from headwater.schemas.messages.control import ControlReply


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
