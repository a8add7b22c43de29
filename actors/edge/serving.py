"""What every endpoint of an edge works with, and one call to it."""

import re
from typing import Any, NamedTuple

from headwater.actors.edge.errors import overloaded
from headwater.actors.edge.fleet import Fleet
from headwater.actors.edge.http import Headers, Receive, Scope, Send
from headwater.actors.edge.ledger import Ledger
from headwater.actors.edge.models import Models
from headwater.actors.edge.not_served import NotServed
from headwater.actors.edge.our_fields import Attempts
from headwater.actors.edge.wishes import ClientLimits
from headwater.schemas.request import PayloadKind

_TRACEPARENT = re.compile(
    rb"(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    rb"(?P<more>-.*)?"
)


class Call(NamedTuple):
    """One POST: its body, the W3C trace it belongs to, the way back, and its headers."""

    body: bytes
    trace: str
    receive: Receive
    send: Send
    headers: Headers


class Serving(NamedTuple):
    """The parts of one edge. `payload` says what it records of requests.

    `limits` bound what clients may wish of a router. `special_tokens_in_text`: control tokens that users and tools spell
    in messages are control tokens.
    """

    fleet: Fleet
    models: Models
    ledger: Ledger
    payload: PayloadKind
    attempts: Attempts
    limits: ClientLimits = ClientLimits()
    special_tokens_in_text: bool = False

    def check(self, request: NotServed, *passed_on: Any) -> None:
        """What every request goes through: fields of ours are counted, here and in values that are passed on.

        Raises `ApiError` 400 for what is not served.
        """
        self.attempts.note(request, *passed_on)
        request.refuse_unsupported()

    def require_open(self) -> None:
        """Raises `ApiError` 503 while no request can be accepted."""
        if self.fleet.closed:
            raise overloaded("This edge starts again.", 1.0)
        if not self.ledger.takes_requests:
            raise overloaded("The request log takes nothing more at the moment.", 1.0)


def trace_of(scope: Scope) -> str:
    """Trace id of the `traceparent` header (W3C Trace Context), empty where there is none or it is malformed."""
    for name, value in scope["headers"]:
        if name == b"traceparent":
            parent = _TRACEPARENT.fullmatch(value)
            # Only later versions than this one may have more behind the flags.
            if parent is None or (parent["version"] == b"00" and parent["more"]):
                return ""
            return parent["trace"].decode()
    return ""
