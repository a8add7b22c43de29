"""`headwater switch` and `headwater rollback`: a roll-out, carried out by events of the pool's log and judged by what the logs hold.

Its plan is the traffic splits that carry it out: its beginning, its next step, its end and its rollback; that part is pure.

A switch keeps nothing that is not in the log: the plan is in the event of its present step, and its gates are computed from the
decisions and requests since that event. So one that was interrupted is continued by another (`--resume`), two at once do no harm (the
second finds that the split it would replace applies no more), and the record says who did what and why.
"""

import asyncio
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable
from headwater.actors.worker.control import request_split
from headwater.events.ports import Log, LogError
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.connect import choose_pool, ports_of
from headwater.ops.operator.compare import EdgeClient, PromptRequest, read_key, read_prompts, request_body
from headwater.ops.operator.rollout_gates import (
    ANSWERS,
    Answers,
    Evidence,
    Side,
    Verdict,
    judge,
    parse_gates,
    sizes,
    summary,
)
from headwater.ops.terminal import table
from headwater.schemas.control import SplitReply, SplitRequest
from headwater.schemas.events import Rollout, SplitSubject, TrafficSplit
from headwater.schemas.routing import Decision, Shadowed
from headwater.schemas.subjects import pool_kinds

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
        shares = tuple(float(share) for share in steps.split(","))
    except ValueError:
        shares = ()
    rises = all(share < other for share, other in pairwise(shares))
    if not shares or not rises or not shares[0] > 0 or shares[-1] != 100:
        raise ConfigError(f"--steps {steps}: write rising percentages up to 100, such as 5,25,100")
    return shares


def parse_hold(text: str) -> float:
    """Seconds in a text such as 10m, 90s or 1.5h. Raises `ConfigError`."""
    match = _TIME.match(text)
    if match is None:
        raise ConfigError(f"--hold {text}: write a time, such as 90s, 10m or 1h")
    return float(match[1]) * _UNITS[match[2] or ""]


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


def begin(rollout_request: Asked, present: SplitReply, id_: str) -> TrafficSplit:
    """The first step. Raises `ConfigError` for a roll-out that cannot begin."""
    active = active_rollout(present)
    if active is not None:
        raise ConfigError(
            f"a roll-out to {active.to} is at {active.share:g} %: `headwater switch --resume` continues it, "
            "`headwater rollback` ends it"
        )
    before = baseline(rollout_request, present)
    rollout = Rollout(
        id_,
        rollout_request.to,
        rollout_request.steps,
        0,
        rollout_request.hold_s,
        rollout_request.gates,
        rollout_request.samples,
        before,
    )
    subject = "revision" if rollout_request.subject == "revision" else "policy"
    return _at(
        rollout,
        rollout_request.subject,
        present,
        rollout_request.by,
        f"roll-out of {subject} {rollout_request.to} begins",
    )


def baseline(rollout_request: Asked, present: SplitReply) -> dict[str, float]:
    """The shares before the roll-out. Raises `ConfigError` where there is nothing to move requests from, or to."""
    if rollout_request.subject == "policy":
        shares = dict(present.split.shares) if present.split is not None else {}
        shares = shares or {present.default: 100.0}
    else:
        _require_workers(rollout_request.to, present)
        shares = dict(present.split.shares) if present.split is not None else {}
        # Without a split the cost decides, and requests are spread over the workers.
        shares = shares or {member.name: float(member.ready) for member in present.members if member.ready}
        shares.pop("", None) if len(shares) > 1 else None
    # With those of share 0, which were rolled back: they must not come back with the next roll-out.
    other_shares = {name: share for name, share in shares.items() if name != rollout_request.to}
    if not any(other_shares.values()):
        raise ConfigError(f"all requests go to {rollout_request.to} already: there is nothing to switch")
    return other_shares


def _require_workers(to: str, present: SplitReply) -> None:
    members = {member.name: member for member in present.members if member.workers}
    if to not in members:
        listed = ", ".join(sorted(filter(None, members))) or "none"
        raise ConfigError(f"--to {to}: no worker is of this revision; the pool's revisions are: {listed}")
    if not members[to].ready:
        raise ConfigError(f"--to {to}: none of its {members[to].workers} workers takes requests")


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


POLL_S: Final = 1.0
SAY_EVERY_S: Final = 60.0
"""A line of progress at least this often."""

CANNED_TOKENS: Final = 64
"""Tokens of an answer to a canned prompt."""

Say = Callable[[str], None]


class Canned(NamedTuple):
    """Canned prompts: their file, and the edge to which they are sent."""

    prompts: str = ""
    url: str = "http://127.0.0.1:8000"
    key_file: str = ""


class RolloutLost(Exception):
    """Somebody else ended the roll-out, or moved it on."""


class Switch:
    """One roll-out of one pool, from its present step on."""

    def __init__(
        self, ports: Ports, pool: str, subject: SplitSubject, by: str, canned: Canned, say: Say
    ) -> None:
        self._ports = ports
        self._pool = pool
        self._subject = subject
        self._by = by
        self._canned = canned
        self._say = say
        self._said: tuple[str, float] = ("", 0.0)

    async def present(self) -> SplitReply:
        """The present split. Raises `ConfigError` where no router answers."""
        reply = await request_split(self._ports, self._pool, SplitRequest(self._subject))
        if reply.reply.status != 200:
            raise ConfigError(f"{reply.reply.detail}")
        return reply

    async def set(self, split: TrafficSplit) -> SplitReply:
        """Set a split; returns the one that applies then. Raises `ConfigError` where it was refused, `RolloutLost` where another came first."""
        reply = await request_split(self._ports, self._pool, SplitRequest(self._subject, split))
        if reply.reply.status == 409:
            raise RolloutLost(reply.reply.detail)
        if reply.reply.status != 200:
            raise ConfigError(reply.reply.detail)
        return reply

    async def run(self, present: SplitReply) -> int:
        """Hold each step, judge it, and go on or roll back. 0 if promoted, 1 if rolled back, by whomever."""
        while True:
            rollout = active_rollout(present)
            if rollout is None:
                return self._tell_end(present)
            try:
                present = await self._hold(present, rollout)
            except RolloutLost as lost:
                self._say(f"{lost}")
                present = await self._patiently()

    def _tell_end(self, present: SplitReply) -> int:
        split = present.split
        rollout = split.rollout if split is not None else None
        if split is None or rollout is None:
            self._say("the traffic split was removed")
            return 1
        self._say(f"{rollout.to}: {rollout.state}: {split.reason}")
        return 0 if rollout.state == "promoted" else 1

    async def _hold(self, present: SplitReply, rollout: Rollout) -> SplitReply:
        """Hold the present step until it is decided; returns the split that applies then."""
        clock = self._ports.clock
        self._say(
            f"{rollout.to}: {rollout.share:g} % since position {present.position}, for {rollout.hold_s:g} s at least"
        )
        began_s = clock.monotonic_s()
        reader = _Reader(self._ports, await self._ports.pool_log(self._pool), present)
        answers: Answers | None = None
        wants_answers = any(name == ANSWERS for name, _ in rollout.gates)
        while True:
            evidence = await reader.read()
            new, old = evidence.side(rollout.to), _joined(evidence, rollout)
            verdicts = judge(rollout.gates, new, old, rollout.samples, answers)
            failed = summary(verdicts, "fails")
            if failed:
                done = await self._roll_back(present, failed)
                if done is not None:
                    return done
                continue
            held_s = max(reader.held_s, clock.monotonic_s() - began_s)
            waits = [verdict for verdict in verdicts if verdict.outcome == "open"]
            if held_s >= rollout.hold_s and waits and wants_answers and answers is None:
                answers = await self._answers(rollout)
                continue
            if held_s >= rollout.hold_s and not waits:
                reason = f"{rollout.share:g} % held for {held_s:.0f} s: {summary(verdicts, 'passes')}"
                return await self.set(promote(present, self._by, reason))
            self._progress(rollout, evidence, verdicts, held_s)
            await clock.sleep(POLL_S)
            now = await self._patiently()
            if now.position != present.position:
                return now

    async def _roll_back(self, present: SplitReply, failed: str) -> SplitReply | None:
        """Roll back; None, after a pause, where that is refused: the old workers may be gone."""
        try:
            return await self.set(roll_back(present, self._by, f"gate failed: {failed}"))
        except ConfigError as error:
            self._say(f"gate failed: {failed}. It cannot be rolled back: {error}. Trying again")
            await self._ports.clock.sleep(POLL_S * 5)
            return None

    def _progress(self, rollout: Rollout, evidence: Evidence, verdicts: list[Verdict], held_s: float) -> None:
        now_s = self._ports.clock.monotonic_s()
        waits = ", ".join(verdict.gate for verdict in verdicts if verdict.outcome == "open")
        said, at_s = self._said
        if waits == said and now_s - at_s < SAY_EVERY_S:
            return
        self._said = (waits, now_s)
        state = f"holds, undecided: {waits}" if waits else "holds, all gates pass so far"
        detail = summary(verdicts, "open") or summary(verdicts, "passes")
        self._say(
            f"{rollout.to}: {state} after {held_s:.0f} s of {rollout.hold_s:g} s; attempts: {sizes(evidence.sides)}. {detail}"
        )

    async def _patiently(self) -> SplitReply:
        """The present split; waits for a router while none answers."""
        while True:
            try:
                return await self.present()
            except ConfigError as error:
                self._say(f"{error}; trying again")
                await self._ports.clock.sleep(POLL_S * 5)

    async def _answers(self, rollout: Rollout) -> Answers:
        """Send the canned prompts to both sides."""
        if not self._canned.prompts:
            raise ConfigError(
                "the roll-out has the gate answers: give its canned prompts with --prompts FILE"
            )
        card = await CardTable(self._ports.cards).get_model(self._pool)
        model = card.name if card is not None else self._pool
        client = EdgeClient(self._canned.url, read_key(self._canned.key_file))
        prompts = read_prompts(Path(self._canned.prompts), 1_000)
        old = main_of(rollout.before)
        return await asyncio.to_thread(_compare, client, model, prompts, old, rollout.to)


def _compare(client: EdgeClient, model: str, prompts: list[PromptRequest], old: str, new: str) -> Answers:
    compared = equal = 0
    differs = ""
    for prompt in prompts:
        body = request_body(prompt, model, CANNED_TOKENS, 0)
        before, after = (
            client.ask(side, prompt.path, body, header="x-headwater-revision") for side in (old, new)
        )
        if before.error or after.error:
            differs = differs or f"{prompt.name}: {after.error or before.error}"
            if before.error:
                # The old side cannot answer it either: it says nothing about the new one.
                continue
        compared += 1
        if not after.error and [token.id for token in before.tokens] == [token.id for token in after.tokens]:
            equal += 1
        else:
            differs = differs or f"{prompt.name} differs first"
    return Answers(compared, equal, differs)


def _joined(evidence: Evidence, rollout: Rollout) -> Side:
    """All old sides as one."""
    joined = Side()
    for name, side in evidence.sides.items():
        if name in rollout.before:
            joined.attempts += side.attempts
            joined.failures += side.failures
            joined.ttft_ms.extend(side.ttft_ms)
            joined.itl_ms.extend(side.itl_ms)
    return joined


class _Reader:
    """Reads both logs from where a step began, and then what is new."""

    def __init__(self, ports: Ports, log: Log, present: SplitReply) -> None:
        subject = present.split.subject if present.split is not None else "revision"
        self._requests = ports.requests
        self._log = log
        self._since_ns = present.since_ns
        self._decided = present.position
        self._requested = -1
        self._evidence = Evidence(subject, present.position)
        self._newest_ns = present.since_ns

    @property
    def held_s(self) -> float:
        """Seconds from the step's beginning to the newest request that was read, by the log server's clock: this machine's may differ."""
        return (self._newest_ns - self._since_ns) / 1e9

    async def read(self) -> Evidence:
        """The evidence up to now; as before while the logs cannot be read."""
        try:
            if self._requested < 0:
                self._requested = await self._requests.position_at(self._since_ns)
            await self._read_requests()
            last = (await self._log.bounds()).last
            async for piece in self._log.scan(self._decided, last, pool_kinds("route")):
                for _, event in piece.events():
                    if isinstance(event, Decision):
                        self._evidence.decision(event)
            self._decided = last
        except LogError:
            return self._evidence
        self._evidence.settle()
        return self._evidence

    async def _read_requests(self) -> None:
        async for piece in self._requests.read(self._requested, follow=False):
            for record in piece.records:
                for event in record.batch.events:
                    self._evidence.request(event)
                self._requested = record.position
                self._newest_ns = max(self._newest_ns, record.stored_ns)


# The commands.


class Options(NamedTuple):
    """What `headwater switch` was asked for. `asked` None: to show the shares, or to go on with what is under way."""

    pool: str
    subject: SplitSubject
    by: str
    asked: Asked | None = None
    canned: Canned = Canned()
    resume: bool = False
    remove: bool = False
    detach: bool = False
    as_json: bool = False


async def run_switch(nats: NatsSettings, options: Options) -> int:
    """Carry out the command. 0, or 1 if the roll-out was rolled back. Raises `ConfigError`."""
    async with ports_of(nats, "operator", "switch") as ports:
        pool = await choose_pool(ports, options.pool)
        say: Say = lambda text: print(text, flush=True)  # noqa: E731 (a name for the annotation)
        switch = Switch(ports, pool, options.subject, options.by, options.canned, say)
        present = await switch.present()
        if options.remove:
            await switch.set(remove(options.subject, present, options.by))
            say("the traffic split was removed: any worker may get any request")
            return 0
        if options.asked is not None:
            present = await _begin(ports, pool, switch, present, options.asked, say)
        elif not options.resume or active_rollout(present) is None:
            return show(pool, present, as_json=options.as_json, resume=options.resume)
        if options.detach:
            return show(pool, present, as_json=options.as_json)
        return await switch.run(present)


async def _begin(
    ports: Ports, pool: str, switch: Switch, present: SplitReply, rollout_request: Asked, say: Say
) -> SplitReply:
    if rollout_request.subject == "policy":
        say(await shadow_record(await ports.pool_log(pool), rollout_request.to))
    try:
        return await switch.set(begin(rollout_request, present, ports.ids()))
    except RolloutLost as lost:
        raise ConfigError(str(lost)) from lost


async def shadow_record(log: Log, policy: str) -> str:
    """What a shadow has recorded of a policy, in a line."""
    judged = agreed = 0
    shadow = chosen = 0.0
    bounds = await log.bounds()
    async for piece in log.scan(0, bounds.last, pool_kinds("shadow")):
        for _, event in piece.events():
            if isinstance(event, Shadowed) and event.policy == policy:
                judged += 1
                agreed += event.worker == event.chosen
                shadow += event.score - event.least
                chosen += event.chosen_score - event.least
    if not judged:
        return f"no shadow has judged {policy} in this log: `headwater shadow --policy {policy}` does, without moving a request"
    return (
        f"a shadow judged {policy} on {judged} decisions: {agreed / judged:.0%} alike; "
        f"it cost {shadow / judged:.2f} above the least on average, what was decided {chosen / judged:.2f}"
    )


async def run_rollback(nats: NatsSettings, pool: str, subject: SplitSubject, by: str, reason: str) -> int:
    """Restore the shares of before the roll-out. Raises `ConfigError`."""
    async with ports_of(nats, "operator", "switch") as ports:
        pool = await choose_pool(ports, pool)
        switch = Switch(ports, pool, subject, by, Canned(), lambda _: None)
        while True:
            present = await switch.present()
            split = roll_back(present, by, reason or "by an operator")
            try:
                done = await switch.set(split)
            except RolloutLost:
                # A step was taken in between: roll that one back.
                continue
            show(pool, done, as_json=False)
            return 0


def show(pool: str, present: SplitReply, *, as_json: bool, resume: bool = False) -> int:
    """Print the shares and the state of the roll-out. 1 where one was to be resumed and none is under way."""
    split = present.split
    rollout = split.rollout if split is not None else None
    if as_json:
        print(msgspec.json.encode(_document(pool, present)).decode())
    else:
        subject = split.subject if split is not None else ("policy" if present.default else "revision")
        total = sum(member.share or 0.0 for member in present.members)
        rows = [
            (
                member.name or "(none)",
                "not set" if member.share is None else f"{member.share / total:.1%}" if total else "0",
                *((f"{member.ready} of {member.workers}", member.requests) if subject == "revision" else ()),
            )
            for member in present.members
        ]
        columns = (
            subject,
            "share",
            *(("workers ready", "requests in flight") if subject == "revision" else ()),
        )
        print(
            f"pool {pool}, traffic split by {subject}: {'none' if split is None or not split.shares else f'position {present.position}'}"
        )
        if rows:
            print(table(columns, rows))
        if rollout is not None and split is not None:
            print(
                f"roll-out to {rollout.to}: {rollout.state}, step {rollout.step + 1} of {len(rollout.steps)}, {rollout.share:g} %; {split.reason} (by {split.by})"
            )
    if resume:
        print("headwater switch: no roll-out is under way", file=sys.stderr)
    return 1 if resume else 0


def _document(pool: str, present: SplitReply) -> dict[str, Any]:
    return {
        "pool": pool,
        "position": present.position,
        "since_ns": present.since_ns,
        "split": present.split and msgspec.structs.asdict(present.split),
        "members": present.members,
    }
