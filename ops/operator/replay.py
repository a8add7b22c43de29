"""`headwater replay`: fold a pool's log again, and with --verify make every decision again."""

import sys
from contextlib import redirect_stdout
from typing import Any, Final, NamedTuple

import msgspec

from headwater.engines.process import collect_rarely, freeze_heap
from headwater.events.chain import Break
from headwater.events.jetstream import JetStreamLog
from headwater.events.ports import Log, Record, Unreadable
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.operator.log_reading import bookmarked_state, decisions_after, first_state, pieces_after
from headwater.ops.terminal import FORMS, Progress, table, time_ns
from headwater.router.decide import RECOMPUTABLE
from headwater.router.replay import Difference, Replay
from headwater.router.state import RouterState, in_order
from headwater.router.worker import NoCredit
from headwater.schemas.routing import RouteRefused

DIFFERENT: Final = 1
"""Exit code where a decision was not reproduced, or the log could not be folded."""


class Replayed(NamedTuple):
    """What came of a replay that began after position `after`. `run` is None without verification."""

    pool: str
    after: int
    events: int
    state: RouterState
    breaks: list[Break]
    decisions: int = 0
    run: Replay | None = None
    difference: Difference | None = None

    @property
    def is_equal(self) -> bool:
        """Was every decision reproduced that can be?"""
        run = self.run
        if run is None:
            return True
        checked = run.verified + run.unverifiable + run.other_algorithms.total()
        return self.difference is None and checked == self.decisions


async def replay(
    nats: NatsSettings, pool: str, *, verify: bool, bookmark: str = "", until: str = "", as_json: bool = False
) -> int:
    """Fold from the start of the log, or from the oldest snapshot that it continues. 1 on a difference.

    With `bookmark`: from the snapshot of that name; with `until`: to a position or time.
    """
    async with operator_ports(nats, "replay") as ports:
        pool = await choose_pool(ports, pool)
        log = await ports.pool_log(pool)
        if verify:
            await _check_whole(log, pool)
        snapshots = SnapshotStore(ports.blobs, pool)
        # What is told about the log in passing is not part of a document.
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            last = await _end(log, until, ports.clock.wall_ns())
            if bookmark:
                state: RouterState | None = await bookmarked_state(snapshots, bookmark, log)
            else:
                state = await first_state(snapshots, log)
            if state is None:
                return DIFFERENT
            if state.position > last:
                raise ConfigError(f"--until {until}: the replay begins at position {state.position}")
            # A collection would go through the state and the compiled kernels again and again: a fold leaves no cycles.
            freeze_heap()
            collect_rarely()
            replayed = await (
                _verified(pool, log, state, last) if verify else _folded(pool, log, state, last)
            )
    if as_json:
        print(msgspec.json.encode(as_data(replayed)).decode())
    else:
        print("\n".join(lines_of(replayed)))
    return 0 if replayed.is_equal else DIFFERENT


async def _check_whole(log: Log, pool: str) -> None:
    """Raises `ConfigError` for a copy of a site's log that lacks what decisions depend on."""
    kinds = await log.copied_kinds() if isinstance(log, JetStreamLog) else ()
    if kinds and "kv" not in kinds:
        raise ConfigError(
            f"--verify: the log of pool {pool} is a site's copy here without its KV-cache events, on which decisions depend. Verify it at the "
            "site, or copy all of it: `headwater mirror SITE --kv`"
        )


async def _end(log: Log, until: str, now_ns: int) -> int:
    """The last position to fold. Raises `ConfigError` for one that the log does not have."""
    bounds = await log.bounds()
    if not until:
        return bounds.last
    if until.isdecimal():
        position = int(until)
    else:
        wall_ns = time_ns(until, now_ns)
        if wall_ns is None:
            raise ConfigError(
                f"--until {until}: it is neither a position nor a time: give a position, {FORMS}"
            )
        position = await log.position_at(wall_ns)
    if not bounds.first <= position <= bounds.last:
        raise ConfigError(f"--until {until}: the log holds positions {bounds.first} to {bounds.last}")
    return position


async def _folded(pool: str, log: Log, state: RouterState, until: int) -> Replayed:
    """Fold the log. Decisions are events like others."""
    start, events = state.position, 0
    state.loads.credit = NoCredit()
    breaks: list[Break] = []
    with Progress(f"folding the log of pool {pool}") as progress:
        async for piece in pieces_after(log, start, until):
            for message in in_order(piece):
                if isinstance(message, Unreadable):
                    state.skip(message)
                    continue
                events += len(message.batch.events)
                broken = state.apply(message)
                if broken is not None:
                    breaks.append(broken)
            progress.at(state.position - start, until - start)
    return Replayed(pool, start, events, state, breaks)


async def _verified(pool: str, log: Log, state: RouterState, until: int) -> Replayed:
    """Fold the log, and make each decision again where it was made. Ends at the first difference."""
    start, events = state.position, 0
    decisions = await decisions_after(log, start, until)
    run = Replay(state, decisions)
    difference = run.start()
    with Progress(f"verifying the decisions of pool {pool}") as progress:
        async for piece in pieces_after(log, start, until):
            if difference is not None:
                break
            for message in in_order(piece):
                events += len(message.batch.events) if isinstance(message, Record) else 0
                difference = run.step(message)
                if difference is not None:
                    break
            progress.at(state.position - start, until - start)
    return Replayed(pool, start, events, state, run.breaks, len(decisions), run, difference)


def lines_of(replayed: Replayed) -> list[str]:
    """The result for people."""
    run, state = replayed.run, replayed.state
    if replayed.difference is not None:
        return [_explain(replayed.difference)]
    lines = [
        f"position {chain_break.position} breaks the chain of {chain_break.subject}: {chain_break.reason}"
        for chain_break in replayed.breaks
    ]
    lines.append(
        f"pool {replayed.pool}: positions {replayed.after + 1} to {state.position}, {replayed.events} events, "
        f"{len(state.loads.workers)} workers, {state.index.rows} blocks, state {state.digest()}"
    )
    if run is None:
        return lines
    lines.append(f"verified {run.verified} of {replayed.decisions} decisions: equal")
    if run.unverifiable:
        lines.append(f"{run.unverifiable} could not be checked: decisions before them are not in this log")
    lines += [
        f"{count} cannot be recomputed: version {version} of the decision algorithm made them, and this release has "
        f"{' and '.join(map(str, sorted(RECOMPUTABLE)))}; use the release that made them"
        for version, count in sorted(run.other_algorithms.items())
    ]
    return lines


def as_data(replayed: Replayed) -> dict[str, Any]:
    """The result for programs. `state` is where the replay ended: at a difference, or at the end."""
    run, state = replayed.run, replayed.state
    data: dict[str, Any] = {
        "pool": replayed.pool,
        "first": replayed.after + 1,
        "last": state.position,
        "events": replayed.events,
        "workers": len(state.loads.workers),
        "blocks": state.index.rows,
        "state": state.digest(),
        "breaks": [chain_break._asdict() for chain_break in replayed.breaks],
    }
    if run is not None:
        data |= {
            "equal": replayed.is_equal,
            "decisions": replayed.decisions,
            "verified": run.verified,
            "unverifiable": run.unverifiable,
            "other_algorithms": {str(version): count for version, count in run.other_algorithms.items()},
        }
    if replayed.difference is not None:
        head, rows = _differing(replayed.difference)
        data["difference"] = {
            "text": head,
            "fields": [{"what": name, "recorded": str(then), "now": str(now)} for name, then, now in rows],
        }
    return data


def _explain(difference: Difference) -> str:
    head, rows = _differing(difference)
    return f"{head}\n{table(('what', 'recorded', 'now'), rows)}" if rows else head


def _differing(difference: Difference) -> tuple[str, list[tuple[str, object, object]]]:
    """What differs: a text, and the fields and candidates that are not the same."""
    recorded, again = difference.recorded, difference.recomputed
    router, epoch = difference.incarnation
    head = (
        f"DIFFERENT: decision {recorded.number} of {router} (epoch {epoch}) for {recorded.request}, "
        f"made at position {recorded.position}"
    )
    if isinstance(again, str):
        return f"{head}\n  cannot be made again: {again}", []
    if isinstance(again, RouteRefused):
        return f"{head}\n  recorded: worker {recorded.worker}\n  now: refused, {again.reason}", []
    rows: list[tuple[str, object, object]] = [
        (name, getattr(recorded, name), getattr(again, name))
        for name in msgspec.structs.asdict(recorded)
        if getattr(recorded, name) != getattr(again, name) and name != "candidates"
    ]
    before = {candidate.worker: candidate for candidate in recorded.candidates}
    after = {candidate.worker: candidate for candidate in again.candidates}
    for worker in sorted(before.keys() | after.keys()):
        if before.get(worker) != after.get(worker):
            rows.append((worker, before.get(worker, "-"), after.get(worker, "-")))
    return head, [(name, _shown(then), _shown(now)) for name, then, now in rows]


def _shown(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value
