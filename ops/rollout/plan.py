"""The plan of a roll-out, and the traffic splits that carry it out: its beginning, its next step, its end and its rollback. Pure."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from msgspec.structs import replace

from headwater.ops.config.setting import ConfigError
from headwater.ops.rollout.gates import ANSWERS, parse_gates
from headwater.schemas.events.fleet import Rollout, SplitSubject, TrafficSplit
from headwater.schemas.events.splits import SplitReply

DEFAULT_STEPS: Final = (5.0, 25.0, 100.0)

_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?\Z")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


class Asked(NamedTuple):
    """What an operator asks for: move requests to `to`."""

    subject: SplitSubject
    to: str
    steps: tuple[float, ...]
    hold_s: float
    gates: tuple[tuple[str, float], ...]
    samples: int
    by: str


def parse_steps(canary: float | None, steps: str) -> tuple[float, ...]:
    """The shares in percent, one after the other; the last is 100. Raises `ConfigError`."""
    if canary is not None and steps:
        raise ConfigError("--canary P is short for --steps P,100: give one of them")
    if canary is not None:
        return (canary, 100.0) if canary < 100 else (100.0,)
    if not steps:
        return DEFAULT_STEPS
    try:
        found = tuple(float(one) for one in steps.split(","))
    except ValueError:
        found = ()
    rises = all(one < other for one, other in pairwise(found))
    if not found or not rises or not found[0] > 0 or found[-1] != 100:
        raise ConfigError(f"--steps {steps}: write rising percentages up to 100, such as 5,25,100")
    return found


def parse_hold(text: str) -> float:
    """Seconds in a text such as 10m, 90s or 1.5h. Raises `ConfigError`."""
    found = _TIME.match(text)
    if found is None:
        raise ConfigError(f"--hold {text}: write a time, such as 90s, 10m or 1h")
    return float(found[1]) * _UNITS[found[2] or ""]


class Words(NamedTuple):
    """How a command writes a plan."""

    canary: float | None
    steps: str
    hold: str
    gates: Sequence[str]
    samples: int
    prompts: str


def ask(subject: SplitSubject, to: str, words: Words, by: str) -> Asked:
    """What the words of a command ask for. Raises `ConfigError`."""
    gates = parse_gates(words.gates)
    if any(name == ANSWERS for name, _ in gates) != bool(words.prompts):
        raise ConfigError("switch: the gate answers and --prompts FILE need each other")
    if subject == "policy" and words.prompts:
        raise ConfigError("switch: a policy changes no answers: --prompts is for revisions")
    steps = parse_steps(words.canary, words.steps)
    return Asked(subject, to, steps, parse_hold(words.hold), gates, words.samples, by)


def begin(asked: Asked, present: SplitReply, id_: str) -> TrafficSplit:
    """The first step. Raises `ConfigError` for a roll-out that cannot begin."""
    active = active_rollout(present)
    if active is not None:
        raise ConfigError(
            f"a roll-out to {active.to} is at {active.share:g} %: `headwater switch --resume` continues it, "
            "`headwater rollback` ends it"
        )
    before = baseline(asked, present)
    rollout = Rollout(id_, asked.to, asked.steps, 0, asked.hold_s, asked.gates, asked.samples, before)
    what = "revision" if asked.subject == "revision" else "policy"
    return _at(rollout, asked.subject, present, asked.by, f"roll-out of {what} {asked.to} begins")


def baseline(asked: Asked, present: SplitReply) -> dict[str, float]:
    """The shares before the roll-out. Raises `ConfigError` where there is nothing to move requests from, or to."""
    if asked.subject == "policy":
        shares = dict(present.split.shares) if present.split is not None else {}
        shares = shares or {present.default: 100.0}
    else:
        _require_workers(asked.to, present)
        shares = dict(present.split.shares) if present.split is not None else {}
        # Without a split the cost decides, and requests are spread over the workers.
        shares = shares or {one.name: float(one.ready) for one in present.members if one.ready}
        shares.pop("", None) if len(shares) > 1 else None
    # With those of share 0, which were rolled back: they must not come back with the next roll-out.
    left = {name: share for name, share in shares.items() if name != asked.to}
    if not any(left.values()):
        raise ConfigError(f"all requests go to {asked.to} already: there is nothing to switch")
    return left


def _require_workers(to: str, present: SplitReply) -> None:
    known = {one.name: one for one in present.members if one.workers}
    if to not in known:
        listed = ", ".join(sorted(filter(None, known))) or "none"
        raise ConfigError(f"--to {to}: no worker is of this revision; the pool's revisions are: {listed}")
    if not known[to].ready:
        raise ConfigError(f"--to {to}: none of its {known[to].workers} workers takes requests")


def promote(present: SplitReply, by: str, reason: str) -> TrafficSplit:
    """The next step of an active roll-out; its end, if that is the last."""
    split, rollout = _active(present)
    return _at(replace(rollout, step=rollout.step + 1), split.subject, present, by, reason)


def _at(rollout: Rollout, subject: SplitSubject, present: SplitReply, by: str, reason: str) -> TrafficSplit:
    """The split of a roll-out's present step."""
    share = rollout.share
    if share >= 100:
        # The others get no share and are not excluded: if all workers of the new revision are lost, they serve.
        excluded = {name: 0.0 for name, part in rollout.before.items() if not part}
        shares = {rollout.to: 100.0, **excluded}
        return TrafficSplit(subject, shares, present.position, by, reason, replace(rollout, state="promoted"))
    total = sum(rollout.before.values())
    shares = {name: (100.0 - share) * part / total for name, part in rollout.before.items()}
    return TrafficSplit(subject, {**shares, rollout.to: share}, present.position, by, reason, rollout)


def roll_back(present: SplitReply, by: str, reason: str) -> TrafficSplit:
    """The shares of before the roll-out, and nothing for what it moved requests to. Raises `ConfigError` if there is none to roll back."""
    split = present.split
    rollout = split.rollout if split is not None else None
    if split is None or rollout is None or rollout.state == "rolled back":
        raise ConfigError("there is no roll-out to roll back: `headwater switch` shows the shares")
    shares = {**rollout.before, rollout.to: 0.0}
    return TrafficSplit(
        split.subject, shares, present.position, by, reason, replace(rollout, state="rolled back")
    )


def remove(subject: SplitSubject, present: SplitReply, by: str) -> TrafficSplit:
    """No split any more. Raises `ConfigError` while a roll-out is active."""
    active = active_rollout(present)
    if active is not None:
        raise ConfigError(f"a roll-out to {active.to} is at {active.share:g} %: `headwater rollback` first")
    return TrafficSplit(subject, {}, present.position, by, "split removed")


def active_rollout(present: SplitReply) -> Rollout | None:
    """The roll-out that is under way, if one is."""
    rollout = present.split.rollout if present.split is not None else None
    return rollout if rollout is not None and rollout.state == "active" else None


def _active(present: SplitReply) -> tuple[TrafficSplit, Rollout]:
    if present.split is None or present.split.rollout is None:
        raise ConfigError("there is no roll-out")
    return present.split, present.split.rollout


def main_of(shares: Mapping[str, float]) -> str:
    """The side with the largest share: what the new one is compared with by canned prompts."""
    return max(sorted(shares), key=lambda name: shares[name])
