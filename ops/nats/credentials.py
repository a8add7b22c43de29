"""The credentials that a process shows to the NATS server, by the kind of actor it is."""

from pathlib import Path
from urllib.parse import urlsplit

from headwater.events.jetstream import Credentials
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.nats import NatsSettings
from headwater.schemas.subjects import InboxKind

SEED_SUFFIX = ".nk"


def credentials(nats: NatsSettings, kind: InboxKind, name: str) -> Credentials:
    """Credentials of the process `name`. Raises `ConfigError` if the folder of keys has none for it."""
    nkey_file = nats.nkey_file
    if nats.keys_dir and not nkey_file and not nats.creds_file:
        nkey_file = _seed_of(Path(nats.keys_dir), kind, name)
    return Credentials(
        nkey_file=nkey_file,
        creds_file=nats.creds_file,
        tls_ca=nats.tls_ca,
        tls_cert=nats.tls_cert,
        tls_key=nats.tls_key,
        tls_first=nats.tls_first,
    )


def reader_kind(nats: NatsSettings) -> InboxKind:
    """The kind of a command that only reads: operator, unless the keys or the URL's user are an observer's."""
    if urlsplit(nats.url).username == "observer":
        return "observer"
    return _kind_of_key(nats, "observer")


def controller_kind(nats: NatsSettings) -> InboxKind:
    """The kind of a command that controls workers: operator, unless the keys or the URL's user are an admin's."""
    if (urlsplit(nats.url).username or "").partition(".")[0] == "admin":
        return "admin"
    return _kind_of_key(nats, "admin")


def _kind_of_key(nats: NatsSettings, other: InboxKind) -> InboxKind:
    """The operator's kind, or `other` if the folder of keys has a key of that kind only."""
    folder = Path(nats.keys_dir) if nats.keys_dir else None
    if folder and not (folder / seed_file("operator")).exists() and (folder / seed_file(other)).exists():
        return other
    return "operator"


def seed_file(kind: InboxKind, name: str = "") -> str:
    """File name of the seed of one actor, or of all of a kind."""
    return f"{kind}.{name}{SEED_SUFFIX}" if name else f"{kind}{SEED_SUFFIX}"


def _seed_of(folder: Path, kind: InboxKind, name: str) -> str:
    """The actor's own key if there is one, else its kind's."""
    own, shared = folder / seed_file(kind, name), folder / seed_file(kind)
    for path in (own, shared):
        if path.exists():
            return str(path)
    raise ConfigError(
        f"--nats-keys-dir {folder}: contains neither {own.name} nor {shared.name}; "
        "create them with `headwater nats-config --out`"
    )
