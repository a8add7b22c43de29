"""`headwater doctor`: what is wrong with a fleet, its server and this machine, and the remedy of each.

Facts of the whole fleet are collected once (`doctor_collect`); each check is one small pure function from facts to findings.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from headwater.engines import registry
from headwater.engines.launcher import launcher_type, open_vulnerabilities
from headwater.ops import diagnosis
from headwater.ops.debug.doctor_collect import Asked, collect
from headwater.ops.debug.doctor_facts import ClockFacts, Facts, Listener
from headwater.ops.diagnosis import KINDS, ORDER, Finding, Severity, finding
from headwater.ops.nats import server
from headwater.ops.operator.streams import change
from headwater.ops.terminal import table
from headwater.router.worker import Worker
from headwater.schemas.names import host_port
from headwater.schemas.tables import Lease

CLOCK_S_MAX = 1.0
"""Estimates of the router are off by what clocks differ; from a second on they are of no use."""

FEW = 3
"""Fewer messages may all have been late; a time before the server's is wrong whatever happened."""

EVERYWHERE = ("0.0.0.0", "::")


def check_reach(facts: Facts) -> Iterator[Finding]:
    """Does the server answer, and let us in?"""
    if facts.unreachable is None:
        return
    reason, denied = facts.unreachable
    kind = "nats-denied" if denied else "nats-unreachable"
    fleet = facts.machine.fleet
    if fleet is not None and not denied:
        remedy = f"the fleet of {fleet.folder} has its server on port {fleet.port}: give --nats nats://127.0.0.1:{fleet.port}"
        yield finding(kind, facts.url, reason, remedy=remedy)
    else:
        yield finding(kind, facts.url, reason)


def check_server(facts: Facts) -> Iterator[Finding]:
    """Version, JetStream, `max_payload`, sync, store, login: what each process says of its server, too."""
    for server_facts in (facts.server, *facts.other_servers):
        if server_facts is not None:
            yield from server.check_server(server_facts)


def check_streams(facts: Facts) -> Iterator[Finding]:
    """What `headwater streams` shows, without its probe."""
    for stream in facts.streams:
        if stream.trouble == "missing":
            yield finding(
                "stream-missing",
                stream.name,
                f"the stream of {stream.what} {stream.pool}".strip() + " does not exist",
            )
            continue
        if stream.trouble:
            yield finding("stream-silent", stream.name, stream.trouble)
            continue
        if stream.to_repair:
            text = ", ".join(f"{change(each)} ({each.cost})" for each in stream.to_repair)
            yield finding("stream-differs", stream.name, text)
        if stream.forgotten:
            yield finding(
                "snapshot-behind", stream.name, f"a new router starts from nothing: {stream.forgotten}"
            )
        if stream.current_replicas < stream.replicas:
            text = f"{stream.current_replicas} of {stream.replicas} replicas are current"
            yield finding("stream-behind", stream.name, text)


def check_disks(facts: Facts) -> Iterator[Finding]:
    """Is there room on this machine's disks?"""
    yield from diagnosis.check_room(facts.machine.disks)


def check_clocks(facts: Facts) -> Iterator[Finding]:
    """The clocks of all machines, against the server's."""
    clocks = [] if facts.own_clock is None else [facts.own_clock]
    clocks += [clock for pool in facts.pools for clock in pool.clocks]
    worst: dict[str, ClockFacts] = {}
    for clock in clocks:
        if clock.messages < FEW and clock.behind_s > 0:
            continue
        if abs(clock.behind_s) > max(
            CLOCK_S_MAX, abs(worst[clock.host].behind_s) if clock.host in worst else 0.0
        ):
            worst[clock.host] = clock
    for host, clock in worst.items():
        way = "behind" if clock.behind_s > 0 else "ahead of"
        yield finding("clock-off", host, f"its clock is {abs(clock.behind_s):.1f} s {way} the NATS server's")


def check_ports(facts: Facts) -> Iterator[Finding]:
    """Who has the ports of a fleet that does not run here."""
    local_leases = [lease for lease in facts.leases or () if lease.host == facts.machine.host]
    if local_leases:
        return
    for fleet_port in facts.machine.wanted_ports:
        if fleet_port.flag == "--nats-port" and facts.unreachable is None:
            continue
        for listener in facts.machine.listeners or ():
            if listener.port == fleet_port.port and _collide(listener.host, fleet_port.host):
                yield finding(
                    "port-taken", f"{fleet_port.flag} {fleet_port.port}", f"{_owner(listener)} listens there"
                )
                break


def _collide(host: str, other: str) -> bool:
    return host == other or host in EVERYWHERE or other in EVERYWHERE or other == "localhost"


def _owner(listener: Listener) -> str:
    if not listener.pid:
        return "a process of another user"
    fleet = ", of a Headwater fleet," if "headwater" in listener.command else ""
    return f"process {listener.pid}{fleet} ({listener.command})"


def check_fleets(facts: Facts) -> Iterator[Finding]:
    """Without a URL the default port is asked; a second fleet of this machine has another one."""
    fleet = facts.machine.fleet
    if facts.given_url or fleet is None or facts.unreachable is not None:
        return
    if not facts.url.endswith(f":{fleet.port}"):
        yield finding(
            "two-fleets",
            facts.url,
            f"the fleet of {fleet.folder} (process {fleet.pid}) has its server on port {fleet.port}: this is another one's",
            remedy=f"give --nats nats://127.0.0.1:{fleet.port}",
        )


def check_key_files(facts: Facts) -> Iterator[Finding]:
    """Files of our keys that others may read."""
    for path in facts.machine.open_key_files:
        yield finding("key-file-readable", path, "its group or everyone may read it")


def check_engine_sockets(facts: Facts) -> Iterator[Finding]:
    """Sockets of engines on this machine that other machines reach."""
    by_worker: dict[str, list[str]] = {}
    for worker, endpoint in facts.machine.engine_sockets:
        by_worker.setdefault(worker, []).append(host_port(endpoint.host, endpoint.port))
    for worker, addresses in by_worker.items():
        yield finding("engine-socket-open", worker, f"listens on {', '.join(sorted(set(addresses)))}")


def check_engine_log(facts: Facts) -> Iterator[Finding]:
    """Why an engine did not start, from the end of its log."""
    if facts.engine_log is not None:
        path, text = facts.engine_log
        yield from diagnosis.explain_engine_log(text, path)


PROMPTS_MIN: Final = 3
"""One prompt may have been aborted, and a second one evicted at once."""

RESTARTS: Final = 3
LAG_S_MAX: Final = 5.0

_OF_HISTORY: Final[dict[str, Severity]] = {"critical": "error", "warning": "warning", "info": "note"}


def check_leases(facts: Facts) -> Iterator[Finding]:
    """Is there an edge, and a router and a worker for each pool?"""
    leases = facts.leases
    if leases is None:
        return
    if not leases:
        yield finding("nothing-runs", f"namespace {facts.namespace}", "no edge, router or worker has a lease")
        return
    if not any(lease.kind == "edge" for lease in leases):
        yield finding("no-edge", f"namespace {facts.namespace}", "clients reach nothing: no edge has a lease")
    routed = _pools(leases, "router")
    served = _pools(leases, "worker")
    for pool in sorted(served - routed):
        yield finding("no-router", pool, "workers serve it, and no router has a lease")
    for pool in sorted((routed | {card.pool for card in facts.cards}) - served):
        yield finding("no-worker", pool, "no worker has a lease: requests for its model get 503")


def _pools(leases: Sequence[Lease], kind: str) -> set[str]:
    return {lease.pool for lease in leases if lease.kind == kind and lease.pool}


def check_stalled(facts: Facts) -> Iterator[Finding]:
    """Does the log take what processes append?"""
    stalled = [f"{lease.kind} {lease.name}" for lease in facts.leases or () if lease.stalled]
    if stalled:
        text = f"what {', '.join(stalled)} append is not accepted"
        yield finding("log-stalled", f"namespace {facts.namespace}", text)


def check_processes(facts: Facts) -> Iterator[Finding]:
    """Processes that have a lease and do not answer, or have another version; and routers that lag, or whose states differ."""
    for one in facts.processes:
        about, data = f"{one.kind} {one.name}", one.data or {}
        if one.data is None:
            text = "it renews its lease, and does not answer within 2 s, asked twice"
            yield finding("process-silent", about, text)
        if one.version and one.version != facts.version:
            yield finding("versions-differ", about, f"has {one.version}; this command {facts.version}")
        if data.get("lag_messages") and float(data.get("lag_s", 0.0)) > LAG_S_MAX:
            text = f"{data['lag_messages']} messages are unread, the newest folded one is {data['lag_s']:g} s old"
            yield finding("router-behind", about, text)
        if others := data.get("diverged"):
            first = min(others.values())
            text = f"its state differs from that of {', '.join(sorted(others))} from position {first} on"
            yield finding("routers-differ", about, text)


def check_restarts(facts: Facts) -> Iterator[Finding]:
    """Workers that join again and again."""
    for pool in facts.pools:
        for worker, times in sorted(pool.joined.items()):
            if times >= RESTARTS:
                yield finding("worker-restarts", worker, f"joined {pool.pool} {times} times in 15 minutes")


def check_history(facts: Facts) -> Iterator[Finding]:
    """What the console's overview shows of each pool that has processes."""
    live = {one.pool for one in facts.leases or () if one.kind == "worker"}
    for pool in facts.pools:
        if pool.pool not in live:
            # Said already: it has no worker.
            continue
        for one in pool.history:
            about = one.worker or one.request or pool.pool
            text = f"{one.title}: {one.text}"
            yield finding("pool-history", about, text, remedy=one.remedy, severity=_OF_HISTORY[one.severity])


def check_block_sizes(facts: Facts) -> Iterator[Finding]:
    """One block size for a model: among its pools with workers, and between a pool's card and its workers."""
    live = {lease.pool: lease.name for lease in facts.leases or () if lease.kind == "worker"}
    sizes: dict[str, dict[int, str]] = {}
    for card in facts.cards:
        if card.pool in live:
            sizes.setdefault(card.name, {})[card.block_size] = live[card.pool]
    for model, worker_by_size in sizes.items():
        if len(worker_by_size) > 1:
            text = ", ".join(
                f"{worker} has blocks of {size} tokens" for size, worker in sorted(worker_by_size.items())
            )
            yield finding("block-size-differs", model, text)
    by_pool = {card.pool: card.block_size for card in facts.cards}
    for pool in facts.pools:
        for worker in pool.workers:
            card_size = by_pool.get(pool.pool, worker.block_size)
            if worker.block_size != card_size:
                text = f"has blocks of {worker.block_size} tokens; the pool's card says {card_size}"
                yield finding("block-size-differs", worker.name, text)


def check_model_files(facts: Facts) -> Iterator[Finding]:
    """The files that each worker of a model has, against those that each edge uses."""
    for missing in facts.missing_files:
        yield finding(
            "model-file-missing", missing.model, f"the {missing.what} of pool {missing.pool} is not stored"
        )
    used = {
        f"edge {process.name}": process.data.get("files", {})
        for process in facts.processes
        if process.kind == "edge" and process.data
    } or {"the model's card": {card.pool: msgspec.structs.asdict(card) for card in facts.cards}}
    for worker in facts.processes:
        if worker.kind != "worker" or not worker.data:
            continue
        for kind, file in (("tokenizer-differs", "tokenizer"), ("template-differs", "chat_template")):
            digest, pool = worker.data.get(file, ""), worker.data.get("pool", "")
            others = [
                who
                for who, files in used.items()
                if digest and files.get(pool, {}).get(file, digest) not in ("", digest)
            ]
            if others:
                file_label = file.replace("_", " ")
                text = f"its {file_label} ({digest[:12]}) is not that of {', '.join(others)} for {worker.data.get('model')}"
                yield finding(kind, f"worker {worker.name}", text)


def check_kv_events(facts: Facts) -> Iterator[Finding]:
    """Engines that serve and announce nothing, or other blocks; and those whose announcements were lost."""
    for pool in facts.pools:
        for worker in pool.workers:
            served = pool.served.get(worker.name)
            if worker.role != "encode" and worker.announces and served and served.prompts >= PROMPTS_MIN:
                if not pool.stored.get(worker.name):
                    text = f"computed {served.prompts} prompts and published no KV event"
                    yield finding("kv-silent", worker.name, text)
                elif not served.announced:
                    text = f"published KV events, and of {served.prompts} prompts none has the hash that the edge computed"
                    yield finding("hashes-differ", worker.name, text)
            if worker.name in pool.cold:
                text = "KV events were lost: its cache does not count until it has announced it again"
                yield finding("kv-lost", worker.name, text)


def check_handoffs(facts: Facts) -> Iterator[Finding]:
    """Workers with a role whose KV no worker takes, or who get none."""
    roles = {"prefill": "decode", "decode": "prefill"}
    split = [(one, each.workers) for each in facts.pools for one in each.workers if one.role in roles]
    for worker, workers in split:
        other = roles[worker.role]
        partners = [one for one in workers if one.role in (other, "both") and one is not worker]
        if "handoff" not in worker.capabilities:
            text = f"is a {worker.role} worker, and its engine cannot hand over KV: it has no connector that does"
        elif not partners:
            text = f"is a {worker.role} worker, and the pool has no {other} worker"
        elif not any(_pair(worker, one) for one in partners):
            theirs = ", ".join(sorted({one.pairs_with or "nothing" for one in partners}))
            text = f"exchanges KV with {worker.pairs_with or 'nothing'} only, the pool's others with {theirs}"
        else:
            continue
        yield finding("handoff-impossible", worker.name, text)


def _pair(worker: Worker, other: Worker) -> bool:
    return (
        bool(worker.pairs_with) and worker.pairs_with == other.pairs_with and "handoff" in other.capabilities
    )


def check_engines(facts: Facts) -> Iterator[Finding]:
    """Releases of engines, against published vulnerabilities. Those that do not matter behind an edge are notes."""
    for process in facts.processes:
        data = process.data or {}
        engine, version = str(data.get("engine", "")), str(data.get("engine_version", ""))
        vulnerabilities = (
            launcher_type(engine).releases.vulnerabilities if engine in registry.all_traits() else ()
        )
        applicable = open_vulnerabilities(version, vulnerabilities)
        for refused in (True, False):
            group = [each for each in applicable if each.refused == refused]
            if group:
                fixed = ".".join(map(str, max(each.fixed for each in group)))
                text = f"{engine} {version}: {'; '.join(f'{each.cve} {each.what}' for each in group)}; fixed in {fixed}"
                yield finding(
                    "engine-vulnerable",
                    f"worker {process.name}",
                    text,
                    severity="error" if refused else "note",
                )


def check_keys(facts: Facts) -> Iterator[Finding]:
    """An edge that wants keys, while there is none."""
    wanting = [
        process.name
        for process in facts.processes
        if "keys" in str((process.data or {}).get("auth", "")).split(",")
    ]
    if wanting and facts.keys == 0:
        text = f"{', '.join(wanting)} wants API keys, and none is valid: every request gets 401"
        yield finding("no-api-key", f"namespace {facts.namespace}", text)


CHECKS: Final[Sequence[Callable[[Facts], Iterable[Finding]]]] = (
    check_reach,
    check_server,
    check_streams,
    check_disks,
    check_ports,
    check_fleets,
    check_clocks,
    check_key_files,
    check_engine_sockets,
    check_leases,
    check_stalled,
    check_processes,
    check_restarts,
    check_history,
    check_block_sizes,
    check_model_files,
    check_kv_events,
    check_handoffs,
    check_engines,
    check_keys,
    check_engine_log,
)

HEALTHY, FOUND, OUT_OF_REACH = 0, 1, 2


async def doctor(options: Asked, *, as_json: bool) -> int:
    """Print all findings. 0: none but notes; 1: some; 2: the server is out of reach. Raises `ConfigError` for wrong arguments."""
    facts = await collect(options)
    findings = diagnose(facts)
    print(as_document(facts, findings) if as_json else as_text(facts, findings))
    sys.stdout.flush()
    if facts.unreachable is not None:
        return OUT_OF_REACH
    return FOUND if any(finding.severity != "note" for finding in findings) else HEALTHY


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, the worst first, and of one severity in the order of the table."""
    findings = [finding for check in CHECKS for finding in check(facts)]
    places = list(KINDS)
    return sorted(findings, key=lambda finding: (ORDER.index(finding.severity), places.index(finding.id)))


def as_document(facts: Facts, findings: Sequence[Finding]) -> str:
    """Everything as JSON."""
    document = {
        "server": facts.url,
        "namespace": facts.namespace,
        "nats_version": facts.server.version if facts.server else "",
        "findings": [entry._asdict() for entry in findings],
        "skipped": [
            {"finding": name, "reason": entry.reason} for entry in facts.skipped for name in entry.findings
        ],
    }
    return msgspec.json.encode(document).decode()


def as_text(facts: Facts, findings: Sequence[Finding]) -> str:
    """The report for people."""
    lines = [_head(facts)]
    if findings:
        rows = [(entry.severity, entry.id, entry.about, entry.text) for entry in findings]
        lines += ["", table(("severity", "finding", "about", "what"), rows), ""]
        lines += dict.fromkeys(f"remedy of {entry.id}: {entry.remedy}" for entry in findings)
    looked_for = len(KINDS) - len({name for entry in facts.skipped for name in entry.findings})
    count = f"{len(findings)} finding{'s' if len(findings) != 1 else ''}"
    lines += ["", f"{count}; {looked_for} of {len(KINDS)} kinds were looked for"]
    lines += [f"  not looked for: {', '.join(entry.findings)}: {entry.reason}" for entry in facts.skipped]
    return "\n".join(lines)


def _head(facts: Facts) -> str:
    parts = [f"{facts.url}, namespace {facts.namespace}"]
    if facts.server is not None:
        parts.append(f"nats-server {facts.server.version}")
    if facts.leases is not None:
        kinds = [lease.kind for lease in facts.leases]
        counts = [(kinds.count(kind), kind) for kind in ("edge", "router", "worker")]
        parts.append(", ".join(f"{count} {kind}{'s' if count != 1 else ''}" for count, kind in counts))
    return "; ".join(parts)
