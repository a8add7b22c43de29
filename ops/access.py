"""What a process shows to the NATS server: from the settings, by the kind of actor it is."""

from pathlib import Path
from urllib.parse import urlsplit

from headwater.events.jetstream import Credentials
from headwater.ops.config import ConfigError, Settings
from headwater.schemas.subjects import InboxKind

SEED_SUFFIX = ".nk"


def credentials(settings: Settings, kind: InboxKind, name: str) -> Credentials:
    """Credentials of the process `name`. Raises `ConfigError` when the folder of keys has none for it."""
    nkey_file = settings.nats_nkey_file
    if settings.nats_keys_dir and not nkey_file and not settings.nats_creds_file:
        nkey_file = _seed_of(Path(settings.nats_keys_dir), kind, name)
    return Credentials(
        nkey_file=nkey_file,
        creds_file=settings.nats_creds_file,
        tls_ca=settings.nats_tls_ca,
        tls_cert=settings.nats_tls_cert,
        tls_key=settings.nats_tls_key,
        tls_first=settings.nats_tls_first == "yes",
    )


def onlooker(settings: Settings) -> InboxKind:
    """Who somebody is that only looks: the operator, unless the keys or the URL's user are an observer's."""
    if urlsplit(settings.nats).username == "observer":
        return "observer"
    folder = Path(settings.nats_keys_dir) if settings.nats_keys_dir else None
    if folder and not (folder / seed_file("operator")).exists() and (folder / seed_file("observer")).exists():
        return "observer"
    return "operator"


def controller(settings: Settings) -> InboxKind:
    """Who somebody is that controls workers: the operator, unless the keys or the URL's user are an admin's."""
    if (urlsplit(settings.nats).username or "").partition(".")[0] == "admin":
        return "admin"
    folder = Path(settings.nats_keys_dir) if settings.nats_keys_dir else None
    if folder and not (folder / seed_file("operator")).exists() and (folder / seed_file("admin")).exists():
        return "admin"
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
        f"--nats-keys-dir {folder}: holds neither {own.name} nor {shared.name}; "
        "`headwater nats-config --out` makes them"
    )
