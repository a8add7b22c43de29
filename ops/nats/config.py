"""`headwater nats-config`: configuration of a nats-server whose users may do what their work needs, and no more.

One user per kind of actor; with `--actor KIND:NAME` one per actor, which may then write and read only as itself.
"""

import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
import nkeys

from headwater.events.jetstream import Credentials
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ENV_PREFIX, ConfigError
from headwater.ops.nats.server import MAX_PAYLOAD
from headwater.schemas import permissions, subjects
from headwater.schemas.names import NATS_PORT, InvalidName, host_port
from headwater.schemas.permissions import DUTIES, KINDS, Kind
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


# The configuration.


def new_seed() -> str:
    """A fresh user seed, `SU…`."""
    seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    return seed.decode()


def public_key(seed: str) -> str:
    """The public key of a seed, `U…`. Raises `ConfigError`."""
    try:
        public: bytes = nkeys.from_seed(bytearray(seed.encode())).public_key
    except (nkeys.NkeysError, ValueError) as error:
        raise ConfigError("a .nk file holds no nkey seed; delete it to have a new one made") from error
    return public.decode().rstrip("=")


Auth = Literal["nkey", "password", "none"]

CLUSTER_PORT_ABOVE = 2000
"""A server's cluster port is its client port plus this."""


class Wanted(NamedTuple):
    """What the configuration is for. `hosts` has one entry per server, or one for all (on one machine)."""

    namespace: str
    auth: Auth = "nkey"
    actors: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()
    servers: int = 1
    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = NATS_PORT
    store: str = "nats-data"
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_verify: bool = False
    sites: tuple[str, ...] = ()
    leaf_port: int = 7422
    hub: tuple[str, ...] = ()

    @property
    def domain(self) -> str:
        """Name of the JetStream domain: servers that leaf nodes connect need different ones."""
        return self.namespace if self.sites or self.hub else ""


PINGS: Final = {"ping_interval": "10s", "ping_max": 3}
"""A host that is cut off closes no connection. By default the server would notice that of clients and leaf nodes after six minutes. A process that
computes or is suspended for seconds keeps its connection.
"""

ROUTE_PINGS: Final = {"ping_interval": "2s", "ping_max": 2}
"""The same of the other servers of a cluster, over which all tokens between hosts pass. What TCP retransmits by itself comes after up to twice the
time that hosts were apart; a route that was closed is open again within a second or two.
"""

LEAF_USER = "leaf"

READERS: Final[tuple[Kind, ...]] = ("operator", "console", "tracer", "observer")
"""Kinds whose users at a hub read the mirrors of its sites, too."""


class User(NamedTuple):
    """A user of the NATS server: all actors of a kind, or the one of that name."""

    kind: Kind
    name: str = ""

    @property
    def label(self) -> str:
        """Its name in files and messages."""
        return f"{self.kind}.{self.name}" if self.name else self.kind


class Made(NamedTuple):
    """File contents by name: the servers' configurations, and what is secret."""

    configurations: dict[str, str]
    secrets: dict[str, str]


def make(plan: Wanted, existing: dict[str, str]) -> Made:
    """The configuration of each server. Secrets in `existing` (file name to content) are kept. Raises `ConfigError`."""
    _check(plan)
    secret_files: dict[str, str] = {}

    def secret(file: str, fresh: str) -> str:
        secret_files[file] = existing.get(file) or fresh + "\n"
        return secret_files[file].strip()

    members = users(plan.actors) if plan.auth != "none" else []
    entries = _entries(plan, members, secret)
    cluster_password = secret(CLUSTER_PASSWORD, secrets.token_urlsafe(24)) if plan.servers > 1 else ""
    leaf_password = ""
    if plan.hub and LEAF_PASSWORD not in existing and plan.auth != "none":
        raise ConfigError(
            f"--hub: copy {LEAF_PASSWORD}, which the hub's `headwater nats-config --site` wrote, into --out first"
        )
    if plan.domain and plan.auth != "none":
        leaf_password = secret(LEAF_PASSWORD, secrets.token_urlsafe(24))
    servers = {}
    for number in range(plan.servers):
        file = "nats.conf" if plan.servers == 1 else f"nats-{number + 1}.conf"
        servers[file] = _text(plan, _server(plan, number, entries, cluster_password, leaf_password), members)
    for user in members:
        secret_files[f"{user.label}.env"] = _environment(plan, user, secret_files)
    return Made(servers, secret_files)


def _entries(plan: Wanted, members: list[User], secret: Callable[[str, str], str]) -> list[dict[str, Any]]:
    """Each user's login and permissions; `secret` returns the content of a file, or keeps the fresh one that it is given."""
    entries: list[dict[str, Any]] = []
    for user in members:
        entry: dict[str, Any]
        if plan.auth == "nkey":
            entry = {"nkey": public_key(secret(seed_file(user.kind, user.name), new_seed()))}
        else:
            entry = {
                "user": user.label,
                "password": secret(f"{user.label}.password", secrets.token_urlsafe(24)),
            }
        try:
            entry["permissions"] = _permissions(plan, user)
        except InvalidName as error:
            raise ConfigError(str(error)) from error
        entries.append(entry)
    return entries


USERS_FILE: Final = "users.conf"
CLUSTER_PASSWORD: Final = "cluster.password"
LEAF_PASSWORD: Final = "leaf.password"
MANIFEST_FILE: Final = "secret.yaml"


def kubernetes_secret(plan: Wanted, name: str, existing: dict[str, str]) -> dict[str, str]:
    """The files of `--kubernetes`: the keys, and a manifest of the Secret `name` with them, the servers' part of the users and the
    password of their routes. Keys in `existing` are kept.

    Where servers listen and store is the chart's. Raises `ConfigError` for what would have no effect.
    """
    default = Wanted(plan.namespace)
    for flag, is_default in (
        ("--auth", plan.auth == default.auth),
        ("--actor", plan.actors == default.actors),
        ("--servers", plan.servers == default.servers),
        ("--hosts", plan.hosts == default.hosts),
        ("--store", plan.store == default.store),
        ("--site, --hub", not (plan.sites or plan.hub)),
        (
            "--tls-cert, --tls-ca",
            not (plan.tls_cert or plan.tls_key or plan.tls_ca or plan.tls_verify),
        ),
    ):
        if not is_default:
            raise ConfigError(
                f"{flag} has no effect with --kubernetes: the chart's values say it; leave it out"
            )
    if not _SECRET_NAME.fullmatch(name):
        raise ConfigError(f"--kubernetes {name}: a Secret's name has lower-case letters, digits, '-' and '.'")
    files: dict[str, str] = {}

    def secret(file: str, fresh: str) -> str:
        files[file] = existing.get(file) or fresh
        return files[file].strip()

    members = users(())
    entries = _entries(plan, members, secret)
    secret(CLUSTER_PASSWORD, secrets.token_urlsafe(24))
    data = {file: text.strip() for file, text in files.items()}
    data[USERS_FILE] = _text(plan, {"authorization": {"users": entries}}, members)
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "type": "Opaque",
        "stringData": data,
    }
    # JSON is YAML.
    return files | {MANIFEST_FILE: msgspec.json.format(msgspec.json.encode(manifest)).decode() + "\n"}


_SECRET_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def known_secrets(folder: Path) -> dict[str, str]:
    """The keys and passwords in a folder, by file name; it is made if it is missing. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        path.name: path.read_text()
        for path in folder.iterdir()
        if path.suffix in (".nk", ".password") and path.is_file()
    }


def write_private(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Write files that only their owner may read; returns their names, sorted. Raises `OSError`."""
    for name, text in files.items():
        path = folder / name
        path.touch(mode=0o600)
        path.chmod(0o600)
        path.write_text(text)
    return sorted(files)


def server_settings(plan: Wanted, number: int, folder: Path) -> dict[str, Any]:
    """The configuration of one server of those that `write` has made keys for in `folder`, without its store. Raises `ConfigError`."""

    def secret(file: str, _: str) -> str:
        try:
            return (folder / file).read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"{folder / file}: {error.strerror}: make the keys with `headwater nats-config --out {folder}`, and copy them to each host"
            ) from error

    _check(plan)
    entries = _entries(plan, users(plan.actors), secret)
    password = secret(CLUSTER_PASSWORD, "") if plan.servers > 1 else ""
    server_config = _server(plan, number, entries, password, "")
    del server_config["jetstream"]
    return server_config


def write(plan: Wanted, folder: Path) -> list[str]:
    """Write everything into `folder`, readable by its owner only; returns the file names. Keys there are kept."""
    try:
        existing = known_secrets(folder)
        # So that the environment files hold from everywhere.
        generated = make(plan._replace(store=str(Path(plan.store).resolve())), existing)
        files = generated.configurations | generated.secrets
        keys_folder = str(folder.resolve())
        return write_private(
            folder, {name: text.replace(_KEYS_HERE, keys_folder) for name, text in files.items()}
        )
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}: {error.filename}") from error


def write_kubernetes(plan: Wanted, name: str, folder: Path) -> list[str]:
    """Write the keys and the manifest of the Secret `name` into `folder`, like `write`; returns the file names. Raises `ConfigError`."""
    try:
        return write_private(folder, kubernetes_secret(plan, name, known_secrets(folder)))
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}: {error.filename}") from error


def users(actors: tuple[str, ...]) -> list[User]:
    """Return one user per kind, and those of `actors` (KIND:NAME) instead of their kind's. Raises `ConfigError`."""
    named: list[User] = []
    for actor in actors:
        kind, _, name = actor.partition(":")
        user_kind = next((value for value in KINDS if value == kind), None)
        if user_kind is None or not name:
            raise ConfigError(f"--actor {actor}: give KIND:NAME, with a kind of {', '.join(KINDS)}")
        named.append(User(user_kind, name))
    named_kinds = {user.kind for user in named}
    return [*(User(kind) for kind in KINDS if kind not in named_kinds), *dict.fromkeys(named)]


_KEYS_HERE = "@KEYS@"


def _check(plan: Wanted) -> None:
    if bool(plan.tls_cert) != bool(plan.tls_key):
        raise ConfigError("--tls-cert and --tls-key belong together: give both")
    if plan.tls_verify and not (plan.tls_ca and plan.tls_cert):
        raise ConfigError("--tls-verify needs --tls-ca, which clients' certificates are checked by")
    if len(plan.hosts) not in (1, plan.servers):
        raise ConfigError(f"--hosts: {len(plan.hosts)} hosts for {plan.servers} servers; give one each")
    if plan.sites and plan.hub:
        raise ConfigError("--site and --hub: servers are a hub's or a site's, not both")
    if plan.namespace in plan.sites:
        raise ConfigError(
            f"--site {plan.namespace}: the hub has this name (--namespace); a site has one of its own"
        )
    for place in plan.hub:
        host, _, port = place.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"--hub {place}: give HOST:PORT of the hub's servers for leaf nodes")


def _addresses(plan: Wanted) -> list[tuple[str, int]]:
    """Return the address each server listens on: servers on different hosts share the port, servers on one host count up from it."""
    if len(plan.hosts) == plan.servers:
        return [(host, plan.port) for host in plan.hosts]
    return [(plan.hosts[0], plan.port + number) for number in range(plan.servers)]


def _permissions(plan: Wanted, user: User) -> dict[str, Any]:
    namespaces = (plan.namespace, *(plan.sites if user.kind in READERS else ()))
    # Pools are named for the own namespace.
    each = [
        permissions.rights(ns, user.kind, name=user.name, pools=() if at else plan.pools)
        for at, ns in enumerate(namespaces)
    ]
    right = each[0]
    allowed = [subject for granted in each for subject in granted.publish]
    if user.kind == "operator":
        allowed += map(permissions.site_api, plan.sites)
    publish: dict[str, Any] = {"allow": list(dict.fromkeys(allowed))}
    # With every pool named nothing is allowed that would have to be taken back.
    denied = [
        subject for at, granted in enumerate(each) if at or not plan.pools for subject in granted.deny_publish
    ]
    if denied:
        publish["deny"] = list(dict.fromkeys(denied))
    heard = list(dict.fromkeys(subject for granted in each for subject in granted.subscribe))
    user_permissions: dict[str, Any] = {"publish": publish, "subscribe": {"allow": heard}}
    if right.answers:
        user_permissions["allow_responses"] = {"max": 1, "expires": permissions.REPLY_EXPIRES}
    return user_permissions


def _server(
    plan: Wanted, number: int, entries: list[dict[str, Any]], cluster_password: str, leaf_password: str
) -> dict[str, Any]:
    addresses = _addresses(plan)
    host, port = addresses[number]
    name = "headwater" if plan.servers == 1 else f"headwater-{number + 1}"
    store = plan.store if plan.servers == 1 else f"{plan.store}/{name}"
    server_config: dict[str, Any] = {
        "server_name": name,
        "listen": host_port(host, port),
        "max_payload": MAX_PAYLOAD,
        "write_deadline": "10s",
        **PINGS,
        "jetstream": {"store_dir": store} | ({"domain": plan.domain} if plan.domain else {}),
    }
    tls = _tls(plan)
    if plan.domain:
        server_config["leafnodes"] = _leaf_nodes(plan, number, leaf_password, tls)
    if tls:
        server_config["tls"] = tls | ({"verify": True} if plan.tls_verify else {})
    if entries:
        server_config["authorization"] = {"users": entries}
    if plan.servers > 1:
        server_config["cluster"] = {
            "name": f"headwater-{plan.namespace}",
            **ROUTE_PINGS,
            "listen": host_port(host, port + CLUSTER_PORT_ABOVE),
            "authorization": {"user": "route", "password": cluster_password},
            "routes": [
                f"nats://route:{cluster_password}@{host_port(other, at + CLUSTER_PORT_ABOVE)}"
                for other, at in addresses
            ],
        } | ({"tls": tls} if tls else {})
    return server_config


def _leaf_nodes(plan: Wanted, number: int, password: str, tls: dict[str, Any]) -> dict[str, Any]:
    """A site's servers connect to all of a hub, which accepts them."""
    login = f"{LEAF_USER}:{password}@" if password else ""
    if plan.hub:
        remote: dict[str, Any] = {
            "urls": [f"nats-leaf://{login}{place}" for place in plan.hub],
            "deny_imports": list(subjects.STORED),
            "deny_exports": list(subjects.STORED),
        }
        return {"remotes": [remote | ({"tls": tls} if tls else {})]}
    host = _addresses(plan)[number][0]
    # Servers on one machine count up, as their other ports do.
    port = plan.leaf_port + (number if len(plan.hosts) != plan.servers else 0)
    accepting: dict[str, Any] = {"listen": host_port(host, port)}
    if password:
        accepting["authorization"] = {"user": LEAF_USER, "password": password}
    return accepting | ({"tls": tls} if tls else {})


def _tls(plan: Wanted) -> dict[str, Any]:
    files = {"cert_file": plan.tls_cert, "key_file": plan.tls_key, "ca_file": plan.tls_ca}
    return {name: str(Path(path).resolve()) for name, path in files.items() if path and plan.tls_cert}


def _text(plan: Wanted, configuration: dict[str, Any], members: list[User]) -> str:
    """Comments, then the settings; a value in JSON is valid in this format."""
    lines = [f"# Headwater, namespace {plan.namespace}. Start with: nats-server -c FILE"]
    lines += [f"# {user.label}: {DUTIES[user.kind]}" for user in members]
    if plan.servers > 1:
        lines.append("# Streams are kept by three servers with: headwater pools --replicas 3")
    lines += [
        f"{key}: {msgspec.json.format(msgspec.json.encode(value)).decode()}"
        for key, value in configuration.items()
    ]
    return "\n".join(lines) + "\n"


def _environment(plan: Wanted, user: User, contents: dict[str, str]) -> str:
    """Settings of an actor as an environment file, for a service manager or a container."""
    login = ""
    lines = []
    if plan.auth == "password":
        login = f"{user.label}:{contents[f'{user.label}.password'].strip()}@"
    else:
        # A process finds its own in there; on another machine the folder holds only what was copied.
        lines.append(f"{ENV_PREFIX}NATS_KEYS_DIR={_KEYS_HERE}")
    url = ",".join(f"nats://{login}{host_port(host, port)}" for host, port in _addresses(plan))
    lines.insert(0, f"{ENV_PREFIX}NATS={url}")
    if user.name:
        lines.append(f"{ENV_PREFIX}NAME={user.name}")
    if plan.tls_ca and plan.tls_cert:
        lines.append(f"{ENV_PREFIX}NATS_TLS_CA={Path(plan.tls_ca).resolve()}")
    if plan.namespace != "default":
        lines.append(f"{ENV_PREFIX}NAMESPACE={plan.namespace}")
    if plan.servers > 1:
        lines.append(f"{ENV_PREFIX}REPLICAS={min(plan.servers, 3)}")
    return "\n".join(lines) + "\n"
