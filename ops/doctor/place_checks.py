"""Checks of the server, the streams and this machine, of facts alone: each is one function from facts to findings."""

from collections.abc import Iterator

from headwater.ops.diagnosis import disk, engine_log, server
from headwater.ops.diagnosis.finding import Finding, finding
from headwater.ops.doctor.facts import ClockFacts, Facts, Listener
from headwater.ops.operator.streams import change
from headwater.schemas.addresses import host_port

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
    for one in (facts.server, *facts.other_servers):
        if one is not None:
            yield from server.check_server(one)


def check_streams(facts: Facts) -> Iterator[Finding]:
    """What `headwater streams` shows, without its probe."""
    for one in facts.streams:
        if one.trouble == "missing":
            yield finding(
                "stream-missing", one.name, f"the stream of {one.what} {one.pool}".strip() + " does not exist"
            )
            continue
        if one.trouble:
            yield finding("stream-silent", one.name, one.trouble)
            continue
        if one.to_repair:
            text = ", ".join(f"{change(each)} ({each.cost})" for each in one.to_repair)
            yield finding("stream-differs", one.name, text)
        if one.forgotten:
            yield finding("snapshot-behind", one.name, f"a new router starts from nothing: {one.forgotten}")
        if one.current_replicas < one.replicas:
            text = f"{one.current_replicas} of {one.replicas} replicas are current"
            yield finding("stream-behind", one.name, text)


def check_disks(facts: Facts) -> Iterator[Finding]:
    """Is there room on this machine's disks?"""
    yield from disk.check_room(facts.machine.disks)


def check_clocks(facts: Facts) -> Iterator[Finding]:
    """The clocks of all machines, against the server's."""
    clocks = [] if facts.own_clock is None else [facts.own_clock]
    clocks += [one for pool in facts.pools for one in pool.clocks]
    worst: dict[str, ClockFacts] = {}
    for one in clocks:
        if one.messages < FEW and one.behind_s > 0:
            continue
        if abs(one.behind_s) > max(CLOCK_S_MAX, abs(worst[one.host].behind_s) if one.host in worst else 0.0):
            worst[one.host] = one
    for host, one in worst.items():
        way = "behind" if one.behind_s > 0 else "ahead of"
        yield finding("clock-off", host, f"its clock is {abs(one.behind_s):.1f} s {way} the NATS server's")


def check_ports(facts: Facts) -> Iterator[Finding]:
    """Who has the ports of a fleet that does not run here."""
    here = [one for one in facts.leases or () if one.host == facts.machine.host]
    if here:
        return
    for wanted in facts.machine.wanted_ports:
        if wanted.flag == "--nats-port" and facts.unreachable is None:
            continue
        for one in facts.machine.listeners or ():
            if one.port == wanted.port and _collide(one.host, wanted.host):
                yield finding("port-taken", f"{wanted.flag} {wanted.port}", f"{_owner(one)} listens there")
                break


def _collide(one: str, other: str) -> bool:
    return one == other or one in EVERYWHERE or other in EVERYWHERE or other == "localhost"


def _owner(one: Listener) -> str:
    if not one.pid:
        return "a process of another user"
    fleet = ", of a Headwater fleet," if "headwater" in one.command else ""
    return f"process {one.pid}{fleet} ({one.command})"


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
    found: dict[str, list[str]] = {}
    for worker, one in facts.machine.engine_sockets:
        found.setdefault(worker, []).append(host_port(one.host, one.port))
    for worker, addresses in found.items():
        yield finding("engine-socket-open", worker, f"listens on {', '.join(sorted(set(addresses)))}")


def check_engine_log(facts: Facts) -> Iterator[Finding]:
    """Why an engine did not start, from the end of its log."""
    if facts.engine_log is not None:
        path, text = facts.engine_log
        yield from engine_log.explain(text, path)
