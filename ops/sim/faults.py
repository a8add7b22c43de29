"""Faults as data: kind, time, duration and target. A seed determines a list of them."""

import random
from typing import Final, Literal

import msgspec

from headwater.actors.runtime import lease

Kind = Literal[
    "drop",
    "duplicate",
    "delay",
    "partition",
    "crash",
    "lease_loss",
    "leases_lost",
    "actor_failure",
    "pause",
    "zombie",
    "clock_jump",
    "log_unavailable",
    "answer_lost",
    "disk_full",
    "slow_reader",
    "purge",
    "replace",
    "alter",
]

SHARES: Final[dict[Kind, int]] = {
    "drop": 3,
    "duplicate": 2,
    "delay": 3,
    "partition": 3,
    "crash": 6,
    "lease_loss": 2,
    "leases_lost": 1,
    "actor_failure": 2,
    "pause": 3,
    "zombie": 3,
    "clock_jump": 1,
    "log_unavailable": 2,
    "answer_lost": 2,
    "disk_full": 2,
    "slow_reader": 2,
    "purge": 1,
    "replace": 1,
    "alter": 1,
}
"""Relative frequency of each kind."""

FROM_S, UNTIL_S = 3.0, 24.0
"""Faults start within this time and end at most 3 s after it."""

LASTING_S_MAX = 6.0
LEASE_S: Final = lease.TTL_S


class Fault(msgspec.Struct, frozen=True):
    """A fault from `at_s` for `for_s` seconds.

    `target` is a process, or empty for faults that affect all. `amount` is a probability (drop, duplicate, answer_lost),
    seconds (delay, clock_jump, slow_reader) or a share of the log (purge, alter).
    """

    kind: Kind
    at_s: float
    for_s: float = 0.0
    target: str = ""
    amount: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.at_s:6.2f} s  {self.kind}"]
        if self.target:
            parts.append(self.target)
        if self.amount:
            parts.append(f"{self.amount:g}")
        if self.for_s:
            parts.append(f"for {self.for_s:.2f} s")
        return " ".join(parts)


def schedule(
    seed: int, engines: list[str], routers: list[str], edges: list[str], encoders: list[str]
) -> list[Fault]:
    """The faults of a seed, by time."""
    # Routers and edges are few: a fault's kind of process is drawn first, otherwise engines would get nearly all faults.
    groups = [group for group in (engines, routers, edges, encoders) if group]
    draw = random.Random(f"faults {seed}")
    kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
    faults = [_fault(draw, draw.choice(kinds), groups, routers) for _ in range(draw.randint(2, 12))]
    return sorted(faults, key=lambda fault: (fault.at_s, fault.kind, fault.target))


def _fault(draw: random.Random, kind: Kind, groups: list[list[str]], routers: list[str]) -> Fault:
    at = round(draw.uniform(FROM_S, UNTIL_S), 3)
    lasting = round(draw.uniform(0.2, min(LASTING_S_MAX, UNTIL_S + 3.0 - at)), 3)
    anyone = draw.choice(draw.choice(groups))
    match kind:
        case "drop" | "duplicate":
            return Fault(kind, at, lasting, amount=round(draw.choice([0.01, 0.05, 0.2, 0.5]), 3))
        case "answer_lost":
            return Fault(kind, at, lasting, amount=round(draw.choice([0.1, 0.5, 1.0]), 3))
        case "delay":
            return Fault(kind, at, lasting, amount=round(draw.choice([0.01, 0.1, 0.5, 2.0]), 3))
        case "partition" | "pause" | "crash":
            return Fault(kind, at, lasting, anyone)
        case "zombie":
            # Suspended for longer than its lease; another process takes its name.
            return Fault(kind, at, round(draw.uniform(LEASE_S + 0.5, LEASE_S + 3.0), 3), anyone)
        case "lease_loss" | "actor_failure":
            return Fault(kind, at, 0.0, anyone)
        case "clock_jump":
            return Fault(kind, at, 0.0, anyone, draw.choice([-3600.0, -10.0, 10.0, 3600.0]))
        case "slow_reader":
            return Fault(kind, at, lasting, draw.choice(routers), round(draw.uniform(0.05, 1.0), 3))
        case "log_unavailable" | "disk_full":
            return Fault(kind, at, lasting)
        case "purge" | "alter":
            return Fault(kind, at, 0.0, amount=round(draw.uniform(0.3, 1.0), 3))
        case "replace" | "leases_lost":
            return Fault(kind, at)
