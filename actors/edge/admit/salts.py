"""Cache salts: cached KV blocks of one tenant never match another tenant's prompts.

    salt = base64url(HMAC-SHA256(namespace key, domain || tenant || the client's own cache_salt))

Engines mix the salt into the hash of a prompt's first block, and every later block's hash includes the one before; the
block hashes that routers and the log see are seeded by it as well. So a tenant measures the same time to first token
whether or not another tenant sent the same prompt, and who reads the log cannot test guesses about prompts without the
namespace key. One salt holds for a whole prompt.

Sharing. Requests of tenants that opted in (`cache_sharing`), whose system prompt is exactly one of those that the operator
publishes, and that have no cache_salt of their own, get that system prompt's salt instead. They share its blocks, and so
could detect what follows it in each other's prompts: sharing is for tenants that trust each other, or prompts whose
continuation is no secret.
"""

import hmac
import secrets
from base64 import urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from headwater.actors.edge.admit.principal import Principal, forbidden
from headwater.actors.edge.settings import HideCachedTokens
from headwater.events.ports import LogError
from headwater.events.table import Table
from headwater.schemas.clock import Clock
from headwater.schemas.subjects import SALT_KEY
from headwater.schemas.tables import ModelCard

KEY_BYTES: Final = 32
RETRY_S: Final = 0.5
REMEMBERED_MAX: Final = 4096

_log = structlog.get_logger("headwater.access")


class CacheSalt(NamedTuple):
    """The salt of one prompt. `hides_usage`: responses must not say how much of the prompt was cached."""

    value: str = ""
    hides_usage: bool = False


NO_SALT: Final = CacheSalt()


class CacheSalts:
    """Derives salts from the namespace key, which `load` must have read."""

    def __init__(
        self,
        hide: HideCachedTokens = "shared",
        shared_prompts: Iterable[str] = (),
        *,
        allow_unsalted_engines: bool = False,
    ) -> None:
        self._hide: HideCachedTokens = hide
        self._shared = frozenset(shared_prompts)
        self._allow_unsalted = allow_unsalted_engines
        self._key = b""
        self._tenants: OrderedDict[str, str] = OrderedDict()

    async def load(self, table: Table, clock: Clock) -> None:
        """Read the namespace key; make it if there is none. Retries until the table answers."""
        while True:
            try:
                self._key = await namespace_key(table)
                return
            except LogError as error:
                _log.warning("namespace_key_not_read", reason=str(error))
                await clock.sleep(RETRY_S)

    def salt_of(
        self, principal: Principal, card: ModelCard, client_salt: str = "", system: str | None = None
    ) -> CacheSalt:
        """The salt of a prompt whose first message is the system prompt `system`; None: it has none.

        Without authentication it is the client's own. Raises `ApiError` 403 for a model whose engine has no salts.
        """
        if not principal.authenticated:
            return CacheSalt(client_salt, self._hide == "always")
        if "cache_salt" not in card.capabilities:
            if self._allow_unsalted:
                return CacheSalt("", self._hide != "never")
            raise forbidden(
                f"{card.name} cannot be served to authenticated tenants: its engine, {card.engine}, has no cache salts, "
                "so tenants could detect each other's prompts. The operator can permit it "
                "(--allow-unsalted-engines).",
                param="model",
                code="no_tenant_isolation",
            )
        if principal.cache_sharing and not client_salt and system is not None and system in self._shared:
            return CacheSalt(self._derive(b"shared", system.encode()), self._hide != "never")
        return CacheSalt(self._of_tenant(principal.tenant, client_salt), self._hide == "always")

    def _of_tenant(self, tenant: str, client_salt: str) -> str:
        if client_salt:
            return self._derive(b"tenant", tenant.encode(), client_salt.encode())
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = self._derive(b"tenant", tenant.encode())
            if len(self._tenants) > REMEMBERED_MAX:
                self._tenants.popitem(last=False)
        return known

    def _derive(self, domain: bytes, *parts: bytes) -> str:
        if not self._key:
            raise RuntimeError("the namespace key has not been read")
        # Each part with its length, so that no two lists of parts are the same text.
        text = b"".join(len(part).to_bytes(4, "big") + part for part in (domain, *parts))
        return urlsafe_b64encode(hmac.digest(self._key, text, sha256)).rstrip(b"=").decode()


async def namespace_key(table: Table) -> bytes:
    """The key that all edges of a namespace derive salts from, made once by the first of them. Raises `LogError`."""
    while True:
        entry = await table.get(SALT_KEY)
        if entry is not None and entry.value:
            return bytes.fromhex(entry.value.decode())
        # Only one of several edges creates it; the others read what that one wrote.
        await table.create(SALT_KEY, secrets.token_hex(KEY_BYTES).encode())


def read_shared_prompts(folder: str) -> list[str]:
    """The system prompts that the operator publishes, one per file. Raises `OSError` and `UnicodeDecodeError`."""
    return [path.read_text("utf-8") for path in sorted(Path(folder).glob("*.txt"))] if folder else []
