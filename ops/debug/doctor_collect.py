"""Collects the facts: one connection that reads, and this machine. Nothing is created, altered or appended."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from headwater import __version__
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import ApiKeyTable, CardTable, LeaseTable
from headwater.events.jetstream import Connection
from headwater.events.jetstream.api import api, parse_time_ns
from headwater.events.jetstream.streams import StreamStatus, survey
from headwater.events.ports import AccessDenied, LogError
from headwater.ops import diagnosis
from headwater.ops.config.sections import NatsSettings, StreamSettings, without_secrets
from headwater.ops.config.setting import ConfigError
from headwater.ops.debug.doctor_facts import (
    THIS_MACHINE,
    ClockFacts,
    Facts,
    MissingFile,
    Place,
    ProcessFacts,
    Skipped,
    Unreachable,
    machine_facts,
    pool_facts,
)
from headwater.ops.diagnosis import KINDS
from headwater.ops.nats.config import credentials, reader_kind
from headwater.ops.nats.connect import frozen_streams, open_connection, server_settings
from headwater.ops.nats.server import ServerFacts, greeting_of, open_ports, server_facts
from headwater.schemas import subjects
from headwater.schemas.clock import SystemClock
from headwater.schemas.tables import Lease, ModelCard

NAME: Final = "doctor"
CONNECT_S: Final = 5.0
ANSWER_S: Final = 2.0
TABLES_S: Final = 15.0
LOG_S: Final = 60.0
"""Deadlines: of what is small, and of the log of one pool."""

AT_ONCE: Final = 64
LOG_END_BYTES: Final = 256 * 1024

OF_SERVER: Final = (diagnosis.INFO, diagnosis.ACCOUNT, diagnosis.STREAM_INFO)
OF_TABLES: Final = (
    diagnosis.LEASES,
    diagnosis.CARDS,
    diagnosis.STATISTICS,
    diagnosis.OBJECTS,
    diagnosis.API_KEYS,
)
OF_LOGS: Final = (diagnosis.POOL_LOG, diagnosis.FOLD)


class Asked(NamedTuple):
    """What the command was asked for. `monitor` is the URL of the server's monitoring port, "" for that of a fleet of the data folder."""

    nats: NatsSettings
    streams: StreamSettings
    place: Place
    monitor: str = ""
    engine_log: str = ""


async def collect(options: Asked) -> Facts:
    """All facts that can be learned. Raises `ConfigError` for arguments that are wrong."""
    nats = options.nats
    facts = Facts(
        without_secrets(nats.address),
        nats.namespace,
        __version__,
        given_url=bool(nats.url),
        engine_log=_log_end(options.engine_log),
    )
    if not options.engine_log:
        facts = _without(
            facts, "pass the end of a failed engine's log with --engine-log", diagnosis.ENGINE_LOG
        )
    kind = reader_kind(nats)
    # The files of keys are wrong arguments; what the server says of them is a finding.
    credentials(nats, kind, NAME).check()
    try:
        client = await open_connection(nats, kind, NAME, wait_s=CONNECT_S)
        try:
            facts = await _of_server(client, options, facts)
        finally:
            await client.close()
    except AccessDenied as error:
        facts = facts._replace(unreachable=Unreachable(str(error), denied=True))
    except LogError as error:
        facts = facts._replace(unreachable=Unreachable(str(error), denied=False))
    if facts.unreachable is not None:
        facts = _without(facts, "the server is out of reach", *OF_SERVER, *OF_TABLES, *OF_LOGS)
    machine = await asyncio.to_thread(machine_facts, nats, options.place, facts.leases or ())
    if machine.listeners is None:
        facts = _without(facts, "this system does not list its sockets", diagnosis.SOCKETS)
    return await _of_monitor(facts._replace(machine=machine), options.monitor)


def _without(facts: Facts, reason: str, *sources: str) -> Facts:
    """The facts without those of some sources: what is found in them was not looked for."""
    missed = tuple(name for name, kind in KINDS.items() if kind.source in sources)
    return facts._replace(skipped=(*facts.skipped, Skipped(missed, reason)))


def _log_end(path: str) -> tuple[str, str] | None:
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LOG_END_BYTES))
            return path, file.read().decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"--engine-log {path}: {error.strerror or error}") from error


async def _of_server(client: Connection, options: Asked, facts: Facts) -> Facts:
    """Everything that the server and the processes behind it say."""
    nats = options.nats
    server = server_facts(client.address or facts.url, client.greeting)
    try:
        account = await api(client, "INFO")
    except AccessDenied:
        facts = _without(facts, "the server denies this user its account information", diagnosis.ACCOUNT)
    except LogError:
        # As of a cluster without a leader, whatever this server says of itself.
        server = server._replace(jetstream=False)
    else:
        server = _with_store(server, account)
    facts = facts._replace(server=server)
    if not server.jetstream:
        return _without(
            facts,
            "without JetStream there are no logs and tables",
            diagnosis.STREAM_INFO,
            *OF_TABLES,
            *OF_LOGS,
        )
    facts = facts._replace(other_servers=await _other_servers(client, nats.address))
    streams = await survey(client, nats.namespace, options.streams.replicas, options.streams.sizes)
    facts = facts._replace(streams=tuple(streams), own_clock=await _own_clock(client, streams))
    missing = {stream.name for stream in streams if stream.trouble}
    tables = (subjects.lease_bucket(nats.namespace), subjects.card_bucket(nats.namespace))
    if missing & {subjects.table_stream(table) for table in tables}:
        return _without(facts, "the tables of leases and model cards are missing", *OF_TABLES, *OF_LOGS)
    ports_of = open_ports(
        nats.address,
        nats.namespace,
        NAME,
        kind=reader_kind(nats),
        credentials=credentials(nats, reader_kind(nats), NAME),
        only_reads=True,
    )
    async with ports_of as ports:
        try:
            async with asyncio.timeout(TABLES_S):
                facts = await _of_tables(client, ports, facts, reader_kind(nats))
        except (TimeoutError, LogError) as error:
            reason = str(error) or f"the tables were not read within {TABLES_S:.0f} s"
            return _without(facts, reason, *OF_TABLES, *OF_LOGS)
        return await _of_pools(ports, facts, missing)


async def _other_servers(client: Connection, urls: str) -> tuple[ServerFacts, ...]:
    """What the other servers of the cluster say in their greetings: those that we were given, and those that ours names."""
    addresses = [url.strip().rpartition("@")[2].rpartition("/")[2] for url in urls.split(",")]
    addresses += client.greeting.get("connect_urls") or []
    by_id: dict[str, ServerFacts] = {}
    for address in dict.fromkeys(addresses):
        host, _, port = address.rpartition(":")
        if not port.isdecimal():
            continue
        try:
            greeting = await greeting_of(host.strip("[]"), int(port))
        except (OSError, ValueError, TimeoutError):
            # That it is away is seen in the streams' replicas.
            continue
        # One server may have several addresses.
        by_id.setdefault(str(greeting.get("server_id")), server_facts(f"nats://{address}", greeting))
    by_id.pop(str(client.greeting.get("server_id")), None)
    return tuple(by_id.values())


def _with_store(server: ServerFacts, account: Mapping[str, Any]) -> ServerFacts:
    used = max(int(account.get("storage", 0)), int(account.get("reserved_storage", 0)))
    limit = int((account.get("limits") or {}).get("max_storage", -1))
    return server._replace(storage=used, storage_max=limit)


async def _own_clock(client: Connection, streams: Sequence[StreamStatus]) -> ClockFacts | None:
    """Our clock against the server's: an answer was written between the request and its arrival."""
    offsets_s = []
    for name in [stream.name for stream in streams if not stream.trouble][:3]:
        sent_ns = time.time_ns()
        info = await api(client, f"STREAM.INFO.{name}")
        if stamp_ns := parse_time_ns(info.get("ts", "")):
            offsets_s.append((stamp_ns - (sent_ns + time.time_ns()) // 2) / 1e9)
    return ClockFacts(THIS_MACHINE, min(offsets_s, key=abs), 3) if offsets_s else None


async def _of_tables(client: Connection, ports: Ports, facts: Facts, kind: str) -> Facts:
    """Leases, cards with their files, keys, and what the processes that hold leases say of themselves."""
    leases = await LeaseTable(ports.leases).read_all()
    cards = await CardTable(ports.cards).models()
    facts = facts._replace(
        leases=tuple(leases),
        cards=tuple(cards),
        processes=tuple(await _processes(client, leases)),
        keys=None if kind == "observer" else await _keys(ports),
        missing_files=tuple(await _missing_files(ports, cards)),
    )
    if facts.keys is None:
        reason = "reading the table of API keys needs an operator's key"
        facts = _without(facts, reason, diagnosis.API_KEYS)
    return facts


async def _of_pools(ports: Ports, facts: Facts, missing: set[str]) -> Facts:
    """The logs of all pools that have a lease or a card."""
    leases = facts.leases or ()
    hosts = {lease.name: lease.host for lease in leases}
    offset_s = facts.own_clock.behind_s if facts.own_clock is not None else 0.0
    # The server's clock, which stamps what is in the logs.
    now_ns = ports.clock.wall_ns() + round(offset_s * 1e9)
    for pool in sorted({card.pool for card in facts.cards} | {entry.pool for entry in leases if entry.pool}):
        if subjects.pool_stream(ports.ns, pool) in missing:
            continue
        try:
            async with asyncio.timeout(LOG_S):
                collected = await pool_facts(ports, pool, hosts, now_ns)
        except (TimeoutError, LogError) as error:
            reason = f"pool {pool}: {error or f'its log was not read within {LOG_S:.0f} s'}"
            facts = _without(facts, reason, *OF_LOGS)
        else:
            facts = facts._replace(pools=(*facts.pools, collected))
    return facts


async def _processes(client: Connection, leases: Sequence[Lease]) -> list[ProcessFacts]:
    """What each holder of a lease says of itself; asked twice, as a busy process may not answer in time."""
    at_once = asyncio.Semaphore(AT_ONCE)

    async def ask(lease: Lease) -> ProcessFacts:
        subject = subjects.service("STATS", f"headwater-{lease.kind}", lease.name)
        for _ in range(2):
            try:
                async with at_once:
                    reply = await client.request(subject, timeout=ANSWER_S)
                answer = msgspec.json.decode(reply.data, type=dict[str, Any])
                data = answer["endpoints"][0]["data"]
                return ProcessFacts(lease.kind, lease.name, str(answer.get("version", "")), data)
            except Exception:
                continue
        return ProcessFacts(lease.kind, lease.name)

    return list(await asyncio.gather(*map(ask, leases)))


async def _keys(ports: Ports) -> int | None:
    """How many API keys are valid now; None where we may not read them."""
    now_s = SystemClock().wall_ns() // 1_000_000_000
    try:
        async with asyncio.timeout(ANSWER_S):
            keys = await ApiKeyTable(ports.api_keys).read_all()
    except (LogError, TimeoutError):
        return None
    return sum(not key.expires_s or key.expires_s > now_s for key in keys)


async def _missing_files(ports: Ports, cards: Sequence[ModelCard]) -> list[MissingFile]:
    missing = []
    for card in cards:
        files = {
            "tokenizer": card.tokenizer,
            "chat template": card.chat_template,
            "response template": card.response_template,
        }
        for file_kind, digest in files.items():
            if digest and not await ports.blobs.has(subjects.artifact_name(digest)):
                missing.append(MissingFile(card.pool, card.name, file_kind))
    return missing


async def _of_monitor(facts: Facts, monitor: str) -> Facts:
    """What only the server's monitoring port tells; that of our own fleet is known from its folder."""
    fleet = facts.machine.fleet
    if not monitor and fleet is not None and fleet.monitor_port and _is_of(facts.url, fleet.port):
        monitor = f"http://127.0.0.1:{fleet.monitor_port}"
    if not monitor or facts.server is None:
        reason = "give the URL of the server's monitoring port with --monitor"
        return _without(facts, reason, diagnosis.MONITOR)
    parts = urlsplit(monitor)
    try:
        host, port = parts.hostname or "127.0.0.1", parts.port or 8222
        settings = await server_settings(host, port)
        frozen = await frozen_streams(port, host)
    except (OSError, ValueError, TimeoutError) as error:
        return _without(facts, f"{monitor} does not answer: {error or 'in time'}", diagnosis.MONITOR)
    store = (settings.get("jetstream") or {}).get("config") or {}
    server = facts.server._replace(
        sync_s=store["sync_interval"] / 1e9 if "sync_interval" in store else None,
        sync_always=bool(store.get("sync_always")),
        frozen=frozen,
    )
    return facts._replace(server=server)


def _is_of(url: str, port: int) -> bool:
    """Is a URL that of the server at this port of this machine?"""
    parts = urlsplit(url.partition(",")[0])
    return parts.hostname in ("127.0.0.1", "localhost", "::1") and parts.port == port
