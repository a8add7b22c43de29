"""`headwater sim`: one seed, or many on all cores; a failing one is shrunk, with the command that reproduces it."""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context

import msgspec
import structlog

from headwater.ops.config.errors import ConfigError
from headwater.ops.sim import checks
from headwater.ops.sim.faults import Fault, schedule
from headwater.ops.sim.run import EDGES, ENCODERS, ENGINES, ROUTERS, RUN_S, SeedOutcome, fleet_names, run_seed

RUNS_MAX = 200


def shrink(faults: Sequence[Fault], fails: Callable[[list[Fault]], bool]) -> list[Fault]:
    """Delta debugging: remove halves, then smaller parts, then single faults, as long as the rest still fails.

    `fails` is called at most `RUNS_MAX` times. The result fails if `faults` does, and none of its faults can be
    removed alone.
    """
    left = list(faults)
    parts = 2
    runs = 0
    while left and runs < RUNS_MAX:
        size = -(-len(left) // parts)
        smaller = None
        for start in range(0, len(left), size):
            candidate = left[:start] + left[start + size :]
            runs += 1
            if fails(candidate):
                smaller = candidate
                break
            if runs >= RUNS_MAX:
                return left
        if smaller is not None:
            left, parts = smaller, max(2, parts - 1)
        elif size == 1:
            return left
        else:
            parts = min(len(left), 2 * parts)
    return left


PROGRESS_S = 10.0
SHOWN_MAX = 8
FAILURES_SHOWN_MAX = 10


def run_one(seed: int, *, trace: bool, only: str, as_json: bool) -> int:
    """Run one seed and print what came of it; 1 if it failed."""
    quiet(trace=trace)
    faults = _chosen(seed, only)
    outcome = run_seed(seed, faults, show=trace)
    if as_json:
        print(msgspec.json.encode(outcome).decode())
        return int(outcome.failed)
    print(describe(outcome))
    if outcome.failed and not trace and len(outcome.faults) > 1 and not only:
        print(_shrunk(outcome))
    return int(outcome.failed)


def run_many(text: str, *, as_json: bool, jobs: int = 0) -> int:
    """Run the seeds FROM:TO (TO not included); 1 if any failed."""
    first, last = _range(text)
    began = printed = time.monotonic()
    failed: list[SeedOutcome] = []
    answered = events = done = 0
    encoded: Counter[str] = Counter()
    for outcome in outcomes(range(first, last), jobs or os.cpu_count() or 1):
        done += 1
        answered += outcome.answered
        events += outcome.events
        encoded.update(outcome.encoded)
        if outcome.failed:
            failed.append(outcome)
            if not as_json and len(failed) <= FAILURES_SHOWN_MAX:
                print(describe(outcome), flush=True)
        if not as_json and time.monotonic() - printed > PROGRESS_S:
            printed = time.monotonic()
            print(f"  {done} of {last - first}, {len(failed)} failed", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    if as_json:
        report = {
            "seeds": [first, last],
            "failed": [msgspec.to_builtins(outcome) for outcome in failed],
            "answered": answered,
            "events": events,
            "encoded": encoded,
            "seconds": round(seconds, 1),
        }
        print(msgspec.json.encode(report).decode())
        return int(bool(failed))
    if failed and len(failed[0].faults) > 1:
        quiet(trace=False)
        print(_shrunk(failed[0]))
    print(
        f"{done} seeds of {RUN_S:.0f} virtual seconds, {ENGINES} engines, {ROUTERS} routers, {EDGES} edges, up to {ENCODERS} encode workers: "
        f"{len(failed)} failed; {answered} requests answered, {events} events, images at encode workers: "
        f"{', '.join(f'{count} {outcome}' for outcome, count in sorted(encoded.items())) or 'none'}; "
        f"{seconds:.0f} s ({done * RUN_S / max(seconds, 1e-9):.0f} times real time)"
    )
    if failed:
        kinds = checks.grouped([problem for outcome in failed for problem in outcome.problems])
        print("  " + "; ".join(f"{count} x {kind} …" for kind, count in sorted(kinds.items())))
    return int(bool(failed))


def outcomes(seeds: range, jobs: int) -> Iterator[SeedOutcome]:
    """The outcome of each seed as it comes, `jobs` at a time."""
    if jobs == 1:
        quiet(trace=False)
        yield from map(run_seed, seeds)
        return
    # Forked after the imports and the compiled kernels are here: workers start in no time.
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork"), initializer=_quiet_worker) as pool:
        remaining = iter(seeds)
        waiting = [pool.submit(run_seed, seed) for seed in islice(remaining, 2 * jobs)]
        while waiting:
            yield waiting.pop(0).result()
            waiting += [pool.submit(run_seed, seed) for seed in islice(remaining, 1)]


def _shrunk(outcome: SeedOutcome) -> str:
    """The fewest faults that fail, and the command that shows them."""
    print("  shrinking …", file=sys.stderr, flush=True)
    left = shrink(outcome.faults, lambda faults: run_seed(outcome.seed, faults).failed)
    numbers = [number for number, fault in enumerate(outcome.faults) if fault in left]
    again = run_seed(outcome.seed, left)
    only = ",".join(map(str, numbers)) or "none"
    return (
        f"fails with {len(left)} of {len(outcome.faults)} faults:\n{describe(again)}\n"
        f"  see it happen: headwater sim --seed {outcome.seed} --only {only} --trace"
    )


def describe(outcome: SeedOutcome) -> str:
    """A run for people: its faults, what was wrong, and how to see it again."""
    head = (
        f"seed {outcome.seed}: {'FAILED' if outcome.failed else 'passed'}; {outcome.answered} of "
        f"{outcome.requests} requests answered, {outcome.events} events, run {outcome.digest}"
    )
    lines = [head, *(f"  {fault}" for fault in outcome.faults)]
    lines += [f"  ! {problem}" for problem in outcome.problems[:SHOWN_MAX]]
    if len(outcome.problems) > SHOWN_MAX:
        lines.append(f"  ! and {len(outcome.problems) - SHOWN_MAX} more")
    if outcome.failed:
        lines.append(f"  again: headwater sim --seed {outcome.seed}")
    return "\n".join(lines)


def _chosen(seed: int, only: str) -> list[Fault] | None:
    """The faults of a seed that --only names by number."""
    if not only:
        return None
    faults = schedule(seed, *fleet_names(seed))
    if only == "none":
        return []
    try:
        return [faults[int(number)] for number in only.split(",")]
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"--only {only}: give numbers of faults from 0 to {len(faults) - 1}, as in 0,3, or none"
        ) from error


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (first.isdigit() and colon and last.isdigit() and int(first) < int(last)):
        raise ConfigError(f"--seeds {text}: give FROM:TO, as in 0:500")
    return int(first), int(last)


def quiet(*, trace: bool) -> None:
    """Configure logging: lines would drown the result, but with a trace they are part of it."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("info" if trace else "critical"),
        processors=[structlog.processors.KeyValueRenderer(key_order=["event"])],
        cache_logger_on_first_use=False,
    )


def _quiet_worker() -> None:
    quiet(trace=False)
