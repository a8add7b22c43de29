"""`headwater keys`: creates, lists, updates, revokes and rotates API keys in the table that all edges watch."""

import re
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import msgspec

from headwater.actors.edge.admit.control import digest_of, key_text, new_id, new_secret
from headwater.actors.runtime.tables import ApiKeyTable
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.connect import ports_of
from headwater.ops.terminal import table
from headwater.schemas.tables import (
    ENDPOINTS,
    EVERY,
    PERMISSIONS,
    ApiKey,
    Scopes,
    SecretDigest,
    UsageLimits,
)

TEXT_MAX: Final = 128
GRACE_S_MAX: Final = 366 * 86_400

_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION: Final = re.compile(r"(\d{1,9})([smhd])")
_ID: Final = re.compile(r"(?:hw-)?([0-9a-f]{12})")


class WantedKey(NamedTuple):
    """A key to be created. `expires_in_s` 0: never."""

    tenant: str
    name: str = ""
    models: tuple[str, ...] = (EVERY,)
    endpoints: tuple[str, ...] = (EVERY,)
    permissions: tuple[str, ...] = ()
    expires_in_s: int = 0
    limits: UsageLimits = UsageLimits()
    model_limits: Mapping[str, UsageLimits] = {}
    cache_sharing: bool = False


class KeyChanges(NamedTuple):
    """What is to change of a key; None: nothing. The tenant cannot: data and cached prompts are its own.

    `expires_in_s` counts from now, 0: never. `limits` are those that change, by name. `model_limits` replace all others.
    """

    name: str | None = None
    models: tuple[str, ...] | None = None
    endpoints: tuple[str, ...] | None = None
    permissions: tuple[str, ...] | None = None
    expires_in_s: int | None = None
    limits: Mapping[str, int] = {}
    model_limits: Mapping[str, UsageLimits] | None = None
    cache_sharing: bool | None = None


def new_key(request: WantedKey, now_s: int) -> tuple[ApiKey, str]:
    """A key and its secret. Raises `ConfigError` naming the option at fault."""
    _check_word("--tenant", request.tenant)
    _check_word("--name", request.name or "-")
    _check_known("--endpoints", request.endpoints, (EVERY, *ENDPOINTS))
    _check_known("--allow", request.permissions, tuple(PERMISSIONS))
    key_id, secret = new_id(), new_secret()
    key = ApiKey(
        id=key_id,
        name=request.name,
        tenant=request.tenant,
        digests=(SecretDigest(digest_of(key_id, secret.encode())),),
        created_s=now_s,
        expires_s=now_s + request.expires_in_s if request.expires_in_s else 0,
        scopes=Scopes(request.models, request.endpoints, request.permissions),
        limits=request.limits,
        model_limits=dict(request.model_limits),
        cache_sharing=request.cache_sharing,
    )
    return key, secret


def with_new_secret(key: ApiKey, grace_s: int, now_s: int) -> tuple[ApiKey, str]:
    """The key with a new secret; those before it stay valid for `grace_s` at most."""
    secret, until_s = new_secret(), now_s + grace_s
    older_digests = tuple(
        SecretDigest(digest.digest, min(digest.until_s or until_s, until_s))
        for digest in key.digests
        if grace_s and not (digest.until_s and digest.until_s <= now_s)
    )
    digests = (SecretDigest(digest_of(key.id, secret.encode())), *older_digests)
    return msgspec.structs.replace(key, digests=digests), secret


def with_changes(key: ApiKey, changes: KeyChanges, now_s: int) -> ApiKey:
    """The key as it will be, with the same secrets. Raises `ConfigError` naming the option at fault."""
    _check_word("--name", changes.name or "-")
    _check_known("--endpoints", changes.endpoints or (), (EVERY, *ENDPOINTS))
    _check_known("--allow", changes.permissions or (), tuple(PERMISSIONS))
    scopes = {"models": changes.models, "endpoints": changes.endpoints, "permissions": changes.permissions}
    fields: dict[str, Any] = {
        "scopes": msgspec.structs.replace(key.scopes, **_given(scopes)),
        "limits": msgspec.structs.replace(key.limits, **changes.limits),
    }
    if changes.expires_in_s is not None:
        fields["expires_s"] = now_s + changes.expires_in_s if changes.expires_in_s else 0
    model_limits = None if changes.model_limits is None else dict(changes.model_limits)
    fields |= _given(
        {"name": changes.name, "model_limits": model_limits, "cache_sharing": changes.cache_sharing}
    )
    return msgspec.structs.replace(key, **fields)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def words_of(values: Sequence[str]) -> tuple[str, ...]:
    """The words of a comma-separated option that may be repeated."""
    return tuple(word.strip() for value in values for word in value.split(",") if word.strip())


def words_or_none(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """The words of an option that may be missing; `none`: no word."""
    if values is None:
        return None
    words = words_of(values)
    return () if words == ("none",) else words


def seconds_or_never(text: str | None, option: str) -> int | None:
    """Seconds of a duration that may be missing; 0 for `never`. Raises `ConfigError`."""
    return None if text is None else 0 if text == "never" else seconds_of(text, option)


def seconds_of(text: str, option: str) -> int:
    """Seconds of a duration such as 90d or 12h. Raises `ConfigError`."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{option} {text}: write a number and s, m, h or d, such as 90d")
    return int(match[1]) * _UNITS[match[2]]


def model_limits_of(words: Sequence[str]) -> dict[str, UsageLimits]:
    """Limits by model, of words such as NAME:requests_per_minute=10. Raises `ConfigError`."""
    limits: dict[str, UsageLimits] = {}
    names = UsageLimits.__struct_fields__
    for word in words:
        model, _, limit = word.rpartition(":")
        name, _, number = limit.partition("=")
        if not model or name not in names or not number.isdigit():
            raise ConfigError(
                f"--model-limits {word}: write NAME:LIMIT=NUMBER, where LIMIT is one of {', '.join(names)}"
            )
        present = limits.get(model, UsageLimits())
        limits[model] = msgspec.structs.replace(present, **{name: int(number[:12])})
    return limits


def model_limits_or_none(values: Sequence[str] | None) -> dict[str, UsageLimits] | None:
    """`model_limits_of` an option that may be missing; `none`: no limits. Raises `ConfigError`."""
    words = words_or_none(values)
    return None if words is None else model_limits_of(words)


def _check_word(option: str, text: str) -> None:
    if not text or len(text) > TEXT_MAX or not (text.isascii() and text.isprintable()) or " " in text:
        raise ConfigError(f"{option} {text!r}: use 1 to {TEXT_MAX} printable ASCII characters without spaces")


def _check_known(option: str, words: Sequence[str], choices: Sequence[str]) -> None:
    for word in words:
        if word not in choices:
            raise ConfigError(f"{option} {word}: choose from {', '.join(choices)}")


async def create(nats: NatsSettings, request: WantedKey, *, as_json: bool = False) -> int:
    """Create a key and print it. Raises `ConfigError` and `LogError`."""
    key, secret = new_key(request, int(time.time()))
    async with _keys(nats) as keys:
        while not await keys.create(key):
            key, secret = new_key(request, int(time.time()))
    _print_secret(key, secret, "is valid", as_json=as_json)
    return 0


async def show(nats: NatsSettings, *, as_json: bool = False) -> int:
    """List the keys."""
    async with _keys(nats) as keys:
        api_keys = await keys.read_all()
    if as_json:
        for key in api_keys:
            print(msgspec.json.encode(_described(key)).decode())
        return 0
    rows = [
        (
            key.id,
            key.tenant,
            key.name,
            " ".join(key.scopes.words()),
            _date(key.created_s),
            _date(key.expires_s) if key.expires_s else "never",
            sum(digest.until_s == 0 or digest.until_s > time.time() for digest in key.digests),
        )
        for key in api_keys
    ]
    print(table(("id", "tenant", "name", "scopes", "created", "expires", "secrets"), rows))
    return 0


async def revoke(nats: NatsSettings, ids: Sequence[str]) -> int:
    """Remove keys. Raises `ConfigError` if one does not exist; the others are revoked all the same."""
    if not ids:
        raise ConfigError("keys revoke: give the id of a key, as `headwater keys list` shows it")
    missing = []
    async with _keys(nats) as keys:
        existing = {key.id for key in await keys.read_all()}
        for key_id in map(_id_of, ids):
            if key_id in existing:
                await keys.delete(key_id)
                print(f"revoked {key_id}")
            else:
                missing.append(key_id)
    if missing:
        raise ConfigError(f"keys revoke: there is no key {', '.join(missing)}; see `headwater keys list`")
    return 0


async def update(nats: NatsSettings, key_id: str, changes: KeyChanges, *, as_json: bool = False) -> int:
    """Change what a key may do. Its secrets stay. Raises `ConfigError`, also if there is no such key."""
    key_id = _id_of(key_id)
    async with _keys(nats) as keys:
        while True:
            entry = await keys.get(key_id)
            if entry is None:
                raise ConfigError(f"keys update: there is no key {key_id}; see `headwater keys list`")
            key = with_changes(entry[0], changes, int(time.time()))
            if await keys.replace(key, entry[1]):
                break
    print(msgspec.json.encode(_described(key)).decode() if as_json else f"updated {key_id}")
    return 0


async def rotate(nats: NatsSettings, key_id: str, grace_s: int, *, as_json: bool = False) -> int:
    """Give a key a new secret and print it. Raises `ConfigError` if there is no such key."""
    if grace_s > GRACE_S_MAX:
        raise ConfigError(f"--grace: at most {GRACE_S_MAX // 86_400}d")
    key_id = _id_of(key_id)
    async with _keys(nats) as keys:
        while True:
            entry = await keys.get(key_id)
            if entry is None:
                raise ConfigError(f"keys rotate: there is no key {key_id}; see `headwater keys list`")
            key, secret = with_new_secret(entry[0], grace_s, int(time.time()))
            if await keys.replace(key, entry[1]):
                break
    _print_secret(key, secret, f"has a new secret; the one before is valid for {grace_s} s", as_json=as_json)
    return 0


def _id_of(text: str) -> str:
    """The id of a key as it is written on a command line. The message does not repeat what may be a secret."""
    match = _ID.fullmatch(text)
    if match is None:
        raise ConfigError("keys: an id has 12 hex digits, as `headwater keys list` shows it")
    return match[1]


@asynccontextmanager
async def _keys(nats: NatsSettings) -> AsyncIterator[ApiKeyTable]:
    async with ports_of(nats, "operator", "keys") as ports:
        yield ApiKeyTable(ports.api_keys)


def _print_secret(key: ApiKey, secret: str, action: str, *, as_json: bool) -> None:
    text = key_text(key.id, secret)
    if as_json:
        print(msgspec.json.encode({"key": text, **_described(key)}).decode())
        return
    expires = f", expires {_date(key.expires_s)}" if key.expires_s else ""
    print(
        f"key {key.id} of tenant {key.tenant} {action}{expires}. Keep it: only its digest is stored, it is not shown again.",
        file=sys.stderr,
    )
    print(text)


def _described(key: ApiKey) -> dict[str, Any]:
    """The record without its digests."""
    document: dict[str, Any] = msgspec.to_builtins(key)
    digests = document.pop("digests")
    return {**document, "secrets": len(digests)}


def _date(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) + "Z"
