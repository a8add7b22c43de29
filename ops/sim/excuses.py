"""Which faults may make a request fail. Every other failure is a bug.

A request that ends in an error, a rejection or a broken connection is explained by a fault that was active during the
request, or so shortly before it that the fleet was still recovering. Faults of encode workers explain nothing, as a worker
encodes the images of its requests where they do not. Faults of the log alone (no leader, a full disk, lost
replies, a lost lease bucket) explain nothing, since tokens do not pass through the log; but a starting process needs the
log, so such a fault prolongs the recovery of one that was down.
"""

from typing import Final

from headwater.ops.sim.clients import ClientEvent
from headwater.ops.sim.faults import Fault, Kind

RECOVERY_S: Final = 5.0
"""A new process waits for its predecessor's lease to expire, then reads its state."""

ANSWER_S: Final = 6.0
"""A request to the log whose reply was lost is retried after at most this time."""

MOMENT_S: Final = 1e-6

DOWN: Final[frozenset[Kind]] = frozenset({"crash", "zombie", "pause", "partition", "actor_failure"})
"""A process ended, or does not respond. This affects clients of an edge, and requests without another router or worker."""

MESSAGES: Final[frozenset[Kind]] = frozenset({"drop", "delay"})
"""Messages between processes are delayed or lost."""

LOG: Final[frozenset[Kind]] = frozenset({"log_unavailable", "answer_lost", "disk_full"})

HINDERS: Final[frozenset[Kind]] = LOG | {"delay"}
"""The log replies late, or not at all: a starting process sends about ten requests to it."""


def unexplained(sent: list[ClientEvent], faults: list[Fault], healthy_s: float) -> list[str]:
    """Requests that failed without a fault that explains it, or after the fleet was healthy again at `healthy_s`."""
    problems = []
    for one in sent:
        if one.end not in ("error", "refused", "reset") or one.limited:
            continue
        if one.at_s > healthy_s or not any(_explains(fault, one, faults) for fault in faults):
            problems.append(
                f"client {one.number} (edge {one.edge}, {one.at_s:.3f} to {one.ended_s:.3f} s): {one.end}, "
                f"HTTP {one.status}, not explained by a fault: {one.reason or 'no reason given'}"
            )
    return problems


def _explains(fault: Fault, one: ClientEvent, faults: list[Fault]) -> bool:
    # Virtual times are floats: what a fault ends may end slightly before it.
    if fault.at_s > one.ended_s + MOMENT_S:
        return False
    if fault.kind in MESSAGES:
        return one.end != "reset" and one.at_s <= fault.at_s + fault.for_s + RECOVERY_S
    process = fault.target.partition("-")[0]
    if process == "encode":
        return False
    concerned = fault.target == one.edge if process == "edge" else one.end != "reset"
    return fault.kind in DOWN and concerned and one.at_s <= _recovered_s(fault, faults)


def _recovered_s(fault: Fault, faults: list[Fault]) -> float:
    """When the process has recovered, given that the log is available."""
    until = fault.at_s + fault.for_s + RECOVERY_S
    for other in sorted(faults, key=lambda one: one.at_s):
        again = other.kind in DOWN and other.target == fault.target and other is not fault
        hinders = other.kind in HINDERS or again
        if hinders and fault.at_s <= other.at_s + other.for_s and other.at_s <= until:
            until = max(until, other.at_s + other.for_s + RECOVERY_S + ANSWER_S)
    return until
