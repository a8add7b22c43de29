"""SIGTERM, SIGKILL and SIGSTOP of workers under short requests: each ends, with the answer of an undisturbed run.

python -m tests.faults.kills.worker_signals --requests 10000
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from headwater.actors.runtime.lease import TTL_S
from tests.faults.answers import Answer, client_of, settle
from tests.faults.kills.victims import Victim, victim_of, worker_names
from tests.faults.report import Report, Violation, command
from tests.support.processes.fleet import fleet
from tests.support.processes.restarted import until_healthy

WORKERS = 5
PAUSE_S = (0.5, 2.5)
"""From one signal, and all workers but one taking requests, to the next."""

TOKENS = (8, 40)
"""An answer takes 50 to 250 ms on a quiet machine."""

STOPPED_S = (0.5, 2.0 * TTL_S)
"""How long a worker is stopped: shorter and longer than its lease."""

HANG_S = 60.0
"""A request hangs that has had no token for so long: a lease, a worker's status queries and its restart take a third of it."""

EXAMPLES = 3
"""Cases of a violation that are printed."""

SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP)


class Sent(NamedTuple):
    """The requests that were sent, and what was wrong, by kind: a hang, an error, a wrong answer."""

    answers: list[Answer]
    problems: dict[str, list[str]]


async def worker_signals(
    folder: Path, *, requests: int, seed: int, clients: int = 24, pause_s: tuple[float, float] = PAUSE_S
) -> Report:
    """Signal one worker after the other until at least so many requests have ended, and judge each of these."""
    print(f"worker signals: seed {seed}", file=sys.stderr, flush=True)
    dice, began = random.Random(seed), time.monotonic()
    flags = ("--engine", "sim", "--workers", str(WORKERS))
    async with fleet(folder, *flags, ready_s=120) as up, client_of(up.url) as client:
        victims = [victim_of(up, name) for name in worker_names(up)]
        ready_s = time.monotonic() - began
        sent: Counter[signal.Signals] = Counter()
        sending = asyncio.create_task(_send(client, requests, clients, sent))
        await _signal(victims, up.url, dice, pause_s, sent, sending)
        answers, problems = await sending
        ended_s = time.monotonic() - began
        await until_healthy(up.url, workers=WORKERS)
    slowest = max(answers, key=lambda answer: answer.lasted_s)
    lines = [
        ("seed", str(seed)),
        ("requests", f"{len(answers)} of {TOKENS[0]} to {TOKENS[1]} tokens, {clients} at a time"),
        ("signals", ", ".join(f"{sent[one]} {one.name}" for one in SIGNALS)),
        ("right", str(len(answers) - sum(map(len, problems.values())))),
        ("slowest", f"{slowest.lasted_s:.2f} s"),
        ("longest token gap", f"{max(answer.gap_s for answer in answers):.2f} s"),
        ("fleet ready", f"{ready_s:.0f} s"),
        ("duration", f"{ended_s - ready_s:.0f} s"),
    ]
    violations = [
        Violation(kind, len(cases), "\n    ".join(cases[:EXAMPLES])) for kind, cases in problems.items()
    ]
    return Report("signals to workers", lines, violations)


async def _send(
    client: httpx.AsyncClient, requests: int, clients: int, sent: Counter[signal.Signals]
) -> Sent:
    """At least so many requests, each client one after the other, until each signal was sent as well."""
    answers: list[Answer] = []
    problems: dict[str, list[str]] = {}

    async def ask() -> None:
        while (number := len(answers)) < requests or len(sent) < len(SIGNALS):
            tokens = TOKENS[0] + 7 * number % (TOKENS[1] - TOKENS[0] + 1)
            answer = Answer(number % 97, tokens).start(client)
            answers.append(answer)
            for problem in await settle([answer], stalled_s=HANG_S):
                kind = "hang" if not answer.done else "error" if answer.error else "wrong answer"
                problems.setdefault(kind, []).append(problem)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(ask())
    return Sent(answers, problems)


async def _signal(
    victims: Sequence[Victim],
    url: str,
    dice: random.Random,
    pause_s: tuple[float, float],
    sent: Counter[signal.Signals],
    sending: asyncio.Task[Sent],
) -> None:
    deck: list[signal.Signals] = []
    while not sending.done():
        await asyncio.wait({sending}, timeout=dice.uniform(*pause_s))
        await until_healthy(url, workers=WORKERS - 1)
        deck = deck or dice.sample(SIGNALS, len(SIGNALS))
        pid = dice.choice(victims).pid()
        if sending.done() or not pid:
            continue
        number = deck.pop()
        sent[number] += 1
        # Whoever was fenced while it was stopped may have ended before it is continued.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            if number == signal.SIGSTOP:
                await asyncio.wait({sending}, timeout=dice.uniform(*STOPPED_S))
                os.kill(pid, signal.SIGCONT)


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the order of signals (default: by the clock)")
    parser.add_argument("--clients", type=int, default=24, help="requests at a time")
    given = parser.parse_args()
    seed = given.seed or int(time.time())
    return command(
        lambda folder: worker_signals(folder, requests=given.requests, seed=seed, clients=given.clients)
    )


if __name__ == "__main__":
    sys.exit(main())
