"""`headwater doctor`: what is wrong with a fleet, its server and this machine, and the remedy of each."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from headwater.ops.diagnosis.finding import KINDS, ORDER, Finding
from headwater.ops.doctor import fleet_checks, place_checks
from headwater.ops.doctor.collect import Asked, collect
from headwater.ops.doctor.facts import Facts
from headwater.ops.process.text_table import table

CHECKS: Final[Sequence[Callable[[Facts], Iterable[Finding]]]] = (
    place_checks.check_reach,
    place_checks.check_server,
    place_checks.check_streams,
    place_checks.check_disks,
    place_checks.check_ports,
    place_checks.check_fleets,
    place_checks.check_clocks,
    place_checks.check_key_files,
    place_checks.check_engine_sockets,
    fleet_checks.check_leases,
    fleet_checks.check_stalled,
    fleet_checks.check_answers,
    fleet_checks.check_versions,
    fleet_checks.check_routers,
    fleet_checks.check_restarts,
    fleet_checks.check_history,
    fleet_checks.check_block_sizes,
    fleet_checks.check_model_files,
    fleet_checks.check_kv_events,
    fleet_checks.check_handoffs,
    fleet_checks.check_engines,
    fleet_checks.check_keys,
    place_checks.check_engine_log,
)

HEALTHY, FOUND, OUT_OF_REACH = 0, 1, 2


async def doctor(asked: Asked, *, as_json: bool) -> int:
    """Print all findings. 0: none but notes; 1: some; 2: the server is out of reach. Raises `ConfigError` for wrong arguments."""
    facts = await collect(asked)
    found = diagnose(facts)
    print(as_document(facts, found) if as_json else as_text(facts, found))
    sys.stdout.flush()
    if facts.unreachable is not None:
        return OUT_OF_REACH
    return FOUND if any(one.severity != "note" for one in found) else HEALTHY


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, the worst first, and of one severity in the order of the table."""
    found = [one for check in CHECKS for one in check(facts)]
    places = list(KINDS)
    return sorted(found, key=lambda one: (ORDER.index(one.severity), places.index(one.id)))


def as_document(facts: Facts, found: Sequence[Finding]) -> str:
    """Everything as JSON."""
    document = {
        "server": facts.url,
        "namespace": facts.namespace,
        "nats_version": facts.server.version if facts.server else "",
        "findings": [one._asdict() for one in found],
        "skipped": [
            {"finding": name, "reason": one.reason} for one in facts.skipped for name in one.findings
        ],
    }
    return msgspec.json.encode(document).decode()


def as_text(facts: Facts, found: Sequence[Finding]) -> str:
    """The report for people."""
    lines = [_head(facts)]
    if found:
        rows = [(one.severity, one.id, one.about, one.text) for one in found]
        lines += ["", table(("severity", "finding", "about", "what"), rows), ""]
        lines += dict.fromkeys(f"remedy of {one.id}: {one.remedy}" for one in found)
    looked_for = len(KINDS) - len({name for one in facts.skipped for name in one.findings})
    count = f"{len(found)} finding{'s' if len(found) != 1 else ''}"
    lines += ["", f"{count}; {looked_for} of {len(KINDS)} kinds were looked for"]
    lines += [f"  not looked for: {', '.join(one.findings)}: {one.reason}" for one in facts.skipped]
    return "\n".join(lines)


def _head(facts: Facts) -> str:
    parts = [f"{facts.url}, namespace {facts.namespace}"]
    if facts.server is not None:
        parts.append(f"nats-server {facts.server.version}")
    if facts.leases is not None:
        kinds = [one.kind for one in facts.leases]
        counts = [(kinds.count(kind), kind) for kind in ("edge", "router", "worker")]
        parts.append(", ".join(f"{count} {kind}{'s' if count != 1 else ''}" for count, kind in counts))
    return "; ".join(parts)
