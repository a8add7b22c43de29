"""What a NATS server must be like: checked by the doctor, and by each process when it connects. Pure."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from headwater.ops.diagnosis.finding import Finding, finding
from headwater.schemas.addresses import is_loopback

MAX_PAYLOAD: Final = 8 * 1024 * 1024
"""A prompt of a million tokens is 4 MiB on its way to an engine."""

Version = tuple[int, int, int]

OLDEST: Final[Version] = (2, 14, 0)
"""The first release with all that our streams use: fast-ingest batches."""

SYNC_S_MAX: Final = 120.0
"""The server's default, which our statements about power failures are for."""

STORE_SHARE: Final = 0.9


class ServerFault(NamedTuple):
    """A fault of the releases from `since` to before `fixed`."""

    since: Version
    fixed: Version
    what: str


FAULTS: Final = (
    ServerFault((2, 10, 20), (2, 10, 23), "a killed server may lose a whole stream"),
    ServerFault(
        (2, 10, 0), (2, 12, 3), "a change of a cluster's members under load may lose acknowledged messages"
    ),
)


class ServerFacts(NamedTuple):
    """What a server says of itself. `storage` are bytes in use and `storage_max` what an account may use, -1: no limit.

    What only its monitoring port tells is None where that was not asked.
    """

    url: str
    version: str
    max_payload: int
    jetstream: bool = True
    host: str = "127.0.0.1"
    logged_in: bool = False
    storage: int = 0
    storage_max: int = -1
    sync_s: float | None = None
    sync_always: bool = False
    frozen: dict[str, str] | None = None


def server_facts(url: str, greeting: dict[str, Any]) -> ServerFacts:
    """The facts in the greeting (INFO) that a server sends to each client."""
    return ServerFacts(
        url,
        str(greeting.get("version", "")),
        int(greeting.get("max_payload", 0)),
        # A server of a cluster without a store of its own passes requests on.
        bool(greeting.get("jetstream") or greeting.get("cluster")),
        str(greeting.get("host", "")),
        bool(greeting.get("auth_required")),
    )


def check_server(facts: ServerFacts) -> list[Finding]:
    """Everything that is wrong with a server."""
    return [
        *_version(facts),
        *_jetstream(facts),
        *_payload(facts),
        *_sync(facts),
        *_store(facts),
        *_exposure(facts),
    ]


def version_of(text: str) -> Version | None:
    """The numbers of a version such as 2.15.1-beta.2; None where it has none."""
    parts = text.partition("-")[0].split(".")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return None
    return int(parts[0]), int(parts[1]), int(parts[2])


def _version(facts: ServerFacts) -> Iterator[Finding]:
    found = version_of(facts.version)
    if found is None:
        return
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST[:2]))
        yield finding(
            "nats-old", facts.url, f"nats-server {facts.version}; Headwater needs {oldest} or newer"
        )
    faults = [one for one in FAULTS if one.since <= found < one.fixed]
    if faults:
        # One release has all repairs: those of the newest.
        fixed = ".".join(map(str, max(one.fixed for one in faults)))
        text = "; ".join(one.what for one in faults)
        yield finding("nats-faulty", facts.url, f"nats-server {facts.version}: {text}; fixed in {fixed}")


def _jetstream(facts: ServerFacts) -> Iterator[Finding]:
    if not facts.jetstream:
        yield finding("jetstream-off", facts.url, "JetStream, which keeps the logs, is off or has no leader")


def _payload(facts: ServerFacts) -> Iterator[Finding]:
    if facts.max_payload < MAX_PAYLOAD:
        yield finding(
            "payload-small",
            facts.url,
            f"max_payload is {facts.max_payload} bytes; ours have up to {MAX_PAYLOAD}",
        )


def _sync(facts: ServerFacts) -> Iterator[Finding]:
    if facts.sync_s is not None and not facts.sync_always and facts.sync_s > SYNC_S_MAX:
        yield finding(
            "sync-rare",
            facts.url,
            f"sync_interval is {facts.sync_s:g} s, and should be at most {SYNC_S_MAX:g} s",
        )


def _store(facts: ServerFacts) -> Iterator[Finding]:
    for stream, words in sorted((facts.frozen or {}).items()):
        yield finding("store-frozen", stream, f"takes no writes any more: {words}")
    if facts.storage_max > 0 and facts.storage > STORE_SHARE * facts.storage_max:
        used, limit = facts.storage >> 20, facts.storage_max >> 20
        yield finding("store-full", facts.url, f"{used} of {limit} MiB of the store are used or reserved")


def _exposure(facts: ServerFacts) -> Iterator[Finding]:
    if facts.host and not facts.logged_in and not is_loopback(facts.host):
        yield finding(
            "nats-open",
            facts.url,
            f"the server listens on {facts.host} and lets everyone in, who may then read prompts' hashes and control workers",
        )
