"""The API keys of a namespace, as every edge has them in memory: the table's present state, kept current by a watch.

A request costs a look-up, one BLAKE2b digest and a comparison, a few microseconds, so no verified key is cached and a
revoked one has nowhere to survive. While the table cannot be reached, the keys that were known last are accepted.

A key has an id and a secret. The id finds the record and may appear in logs. The secret is 256 random bits, and only a digest of
it is stored. The digest is fast (BLAKE2b, with the id as its key) because guessing 256 random bits is out of reach at any speed;
the slow hashes that passwords need would cost milliseconds per request and protect nothing here. A fixed form lets scanners find
keys that were published by mistake: hw-[0-9a-f]{12}-[0-9a-f]{64}.
"""

import asyncio
import secrets
from hashlib import blake2b
from hmac import compare_digest
from typing import Final, NamedTuple

import structlog

from headwater.actors.edge.admit.principal import INVALID_KEY, Principal, unauthenticated
from headwater.actors.runtime.tables import ApiKeyTable
from headwater.events.ports import LogError
from headwater.events.table import Table
from headwater.schemas.clock import Clock
from headwater.schemas.tables import ApiKey, SecretDigest

PREFIX: Final = "hw-"
ID_BYTES: Final = 6
SECRET_BYTES: Final = 32

_ID_END: Final = len(PREFIX) + 2 * ID_BYTES
_LENGTH: Final = _ID_END + 1 + 2 * SECRET_BYTES


class PresentedKey(NamedTuple):
    """A key as a client sent it: of the right form, its digits and its secret not yet verified."""

    id: str
    secret: bytes


def new_id() -> str:
    """An id for a new key."""
    return secrets.token_hex(ID_BYTES)


def new_secret() -> str:
    """A secret for a new key."""
    return secrets.token_hex(SECRET_BYTES)


def key_text(key_id: str, secret: str) -> str:
    """The key as its owner uses it."""
    return f"{PREFIX}{key_id}-{secret}"


def parse_key(text: bytes) -> PresentedKey | None:
    """The parts of a key; None if it is not of the form."""
    # Not a regular expression: that would take a third of an authentication.
    if len(text) != _LENGTH or not text.startswith(b"hw-") or text[_ID_END : _ID_END + 1] != b"-":
        return None
    return PresentedKey(text[len(PREFIX) : _ID_END].decode("latin-1"), text[_ID_END + 1 :])


def digest_of(key_id: str, secret: bytes) -> str:
    """Return what is stored of a secret, in hex."""
    return blake2b(secret, digest_size=32, key=key_id.encode(), person=b"headwater key").hexdigest()


def same_digest(first: str, second: str) -> bool:
    """Return whether two digests are equal, in a time that does not depend on where they differ."""
    return compare_digest(first, second)


# The keys of a namespace in memory.

RETRY_S: Final = 0.5

NO_DIGESTS: Final = (SecretDigest("0" * 64),)
"""Compared for an unknown id, so that its answer takes as long as that of a wrong secret."""

_log = structlog.get_logger("headwater.access")


class KnownKey(NamedTuple):
    """What verification needs of one key. `expires_s` 0: never."""

    digests: tuple[SecretDigest, ...]
    expires_s: int
    principal: Principal


class KeyRing:
    """The API keys of a namespace, kept current by `run`. `known` is set once the table was read."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = ApiKeyTable(table)
        self._clock = clock
        self._keys: dict[str, KnownKey] = {}
        self.known = asyncio.Event()

    def __len__(self) -> int:
        return len(self._keys)

    async def run(self) -> None:
        """Follow the table until cancelled."""
        while True:
            try:
                async for changes in self._table.watch():
                    for change in changes:
                        self._take(change.id, change.key)
                    self.known.set()
            except LogError as error:
                _log.warning("api_keys_not_followed", reason=str(error))
            await self._clock.sleep(RETRY_S)

    def _take(self, key_id: str, key: ApiKey | None) -> None:
        if key is None or key.id != key_id:
            self._keys.pop(key_id, None)
        else:
            self._keys[key_id] = KnownKey(key.digests, key.expires_s, principal_of(key))

    def verify(self, presented: PresentedKey) -> Principal:
        """The owner of a key. Raises `ApiError` 401, in the same words and time whatever is wrong with it."""
        found = self._keys.get(presented.id)
        now_s = self._clock.wall_ns() // 1_000_000_000
        digest = digest_of(presented.id, presented.secret)
        matches = False
        for one in found.digests if found is not None else NO_DIGESTS:
            matches |= same_digest(one.digest, digest) and not _is_past(one.until_s, now_s)
        if found is None or not matches or _is_past(found.expires_s, now_s):
            raise unauthenticated(INVALID_KEY)
        return found.principal


def principal_of(key: ApiKey) -> Principal:
    """The sender of requests with this key."""
    return Principal(key.tenant, f"key-{key.id}", key.scopes, key.limits, key.model_limits, key.cache_sharing)


def _is_past(until_s: int, now_s: int) -> bool:
    return bool(until_s) and now_s >= until_s
