"""Requests that come with the router's decision: an endpoint picker has asked for it, and the gateway sends it along in a header.

The header has the decision as the pool log has it, less what only a recomputation needs, under a message authentication code whose key
edges and pickers derive from the namespace key. So a client cannot choose a worker, and an edge that gets a request from a gateway does not
decide again: what the picker decided is what happens.

A decision is followed once, for the prompt that it was made for (`ChoiceMessages.fits`), within `AGE_S_MAX`. The second attempt of a gateway
(`x-envoy-attempt-count`) follows none: the first may have reached another edge.
"""

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from hashlib import sha256
from typing import Final

import msgspec
import structlog

from headwater.actors.edge.admit.salts import namespace_key
from headwater.actors.http.asgi import Headers
from headwater.events.ports import LogError
from headwater.events.table import Table
from headwater.schemas.clock import Clock
from headwater.schemas.constraints import NO_CONSTRAINTS
from headwater.schemas.events.route import Decision

HEADER: Final = b"x-headwater-decision"
ATTEMPT_COUNT: Final = b"x-envoy-attempt-count"

AGE_S_MAX: Final = 60.0
"""Seconds from the decision until an edge has the request. A body of the greatest size takes a fraction of it."""

REMEMBERED_MAX: Final = 65_536
"""Decisions that an edge remembers to have followed: more than it gets within `AGE_S_MAX`."""

CODE_BYTES: Final = 16
_DOMAIN: Final = b"headwater picked"

_log = structlog.get_logger("headwater.picked")


class Picked(msgspec.Struct, frozen=True, array_like=True):
    """A decision that comes with a request. `id` is the request's, as an edge would make it up; `pool` is where it was decided."""

    id: str
    pool: str
    decision: Decision

    @property
    def attempt(self) -> int:
        """The number of the attempt that the decision was made for: the end of its name."""
        return int(self.decision.request.rpartition("-")[2])


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Picked).decode


class DecisionSeal:
    """Writes and reads the header, with the key in the table of shared secrets."""

    def __init__(self, secrets: Table, clock: Clock) -> None:
        self._secrets = secrets
        self._clock = clock
        self._key = b""
        self._followed: OrderedDict[str, None] = OrderedDict()

    async def load(self) -> None:
        """Read the key. Raises `LogError`."""
        if not self._key:
            self._key = hmac.digest(await namespace_key(self._secrets), _DOMAIN, sha256)

    def seal(self, picked: Picked) -> bytes:
        """The header's value. The key must have been read."""
        decision = picked.decision
        short = msgspec.structs.replace(
            decision, candidates=(decision.chosen,), constraints=NO_CONSTRAINTS, assumed=b"", excluded=b""
        )
        text = _encode(Picked(picked.id, picked.pool, short))
        return urlsafe_b64encode(self._code(text) + text)

    async def open(self, headers: Headers) -> Picked | None:
        """The decision in a request's headers. None without one, and for one that is not to be followed, whose reason is logged."""
        value = next((value for name, value in headers if name == HEADER), b"")
        if not value:
            return None
        try:
            await self.load()
            picked = self._open(value)
        except LogError as error:
            _log.warning("pick_not_read", reason=str(error))
            return None
        except ValueError as error:
            _log.warning("pick_rejected", reason=str(error))
            return None
        if next((value for name, value in headers if name == ATTEMPT_COUNT), b"1") != b"1":
            return None
        if picked.id in self._followed:
            _log.warning("pick_rejected", attempt=picked.decision.request, reason="it was followed before")
            return None
        self._followed[picked.id] = None
        if len(self._followed) > REMEMBERED_MAX:
            self._followed.popitem(last=False)
        return picked

    def _open(self, value: bytes) -> Picked:
        """Raises `ValueError`."""
        raw = urlsafe_b64decode(value)
        code, text = raw[:CODE_BYTES], raw[CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(text)):
            raise ValueError("it is not from a picker of this namespace")
        picked = _decode(text)
        age_s = (self._clock.wall_ns() - picked.decision.wall_ns) / 1e9
        if abs(age_s) > AGE_S_MAX:
            raise ValueError(f"it is {age_s:.0f} s old by this machine's clock")
        return picked

    def _code(self, text: bytes) -> bytes:
        return hmac.digest(self._key, text, sha256)[:CODE_BYTES]
