"""SIGKILL and orderly stops of random processes under long answers: only what a killed edge was serving is lost.

python -m tests.faults.kills.random_kills --seconds 300 --seed 1
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
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import httpx

from headwater.actors.limits import DRAIN_TIMEOUT_S
from tests.faults.answers import PACE, Answer, client_of, succeeds
from tests.faults.kills.victims import Victim, gone, victim_of, worker_names
from tests.faults.report import Report, Violation, command
from tests.support.processes.fleet import fleet
from tests.support.processes.restarted import kept_edge, kept_router, until_healthy, until_ready

AGAIN = 0.2
"""Probability that the next process killed is the one killed last: its next life may not be ready yet."""

PAUSE_S = (1.5, 6.5)
"""Time from kill to kill; processes need up to five seconds to be there again."""

STOPPED = 0.3
"""Share of signals that are an orderly stop as a service manager sends it, to the process and again from its parent, instead of SIGKILL."""

STOPS = (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP)

CONNECT_S_MAX = 30.0
"""An edge that was killed, and not once more meanwhile, takes connections again within this; one that was stopped, after it has drained."""

END_S_MAX = 45.0
"""How much longer than undisturbed an answer may take."""


class Shape(NamedTuple):
    """How many of each. With `prefill` workers `workers` are not used."""

    edges: int = 3
    routers: int = 2
    workers: int = 4
    prefill: int = 0
    decode: int = 0

    @property
    def all_workers(self) -> int:
        """Workers of any role."""
        return self.prefill + self.decode if self.prefill else self.workers

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of `headwater up`."""
        if not self.prefill:
            return ("--workers", str(self.workers))
        roles = ("--prefill-workers", str(self.prefill), "--decode-workers", str(self.decode))
        return (*roles, "--disaggregate", "always")


DEFAULT = Shape()


SHUTTING_DOWN = "Server is shutting down; retry."
"""What an edge that was stopped in order says to answers that still run when its time to drain is over."""


class Kill(NamedTuple):
    """A process that was killed, and since when it is gone: until then it takes connections, only to break them. `stopped`: in order."""

    at_s: float
    gone_s: float
    name: str
    stopped: bool = False

    def ends(self, answer: Answer) -> bool:
        """May this have ended an answer of the edge? Of a stopped one only if it was still there after the time to drain."""
        during = self.gone_s >= answer.began_s - 0.1 and self.at_s <= answer.ended_s + 0.1
        # A kept connection is closed behind the answer that was on it: what a client sends in that moment was never begun, and it may
        # send it again. HTTP/1.1 cannot announce the end in headers that were sent before the stop.
        never_begun = not answer.status
        return during and (
            not self.stopped or never_begun or answer.ended_s > self.at_s + DRAIN_TIMEOUT_S - 1
        )


class Served(NamedTuple):
    """An answer and the edge that was asked for it."""

    edge: str
    answer: Answer


async def random_kills(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    shape: Shape = DEFAULT,
    answer_s: float = 30.0,
    streams: int = 6,
) -> Report:
    """Kill for `seconds` under `streams` streams at a time, wait until all have ended, and judge each."""
    print(f"random kills: seed {seed}", file=sys.stderr, flush=True)
    dice = random.Random(seed)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        up = await stack.enter_async_context(fleet(folder, "--engine", "sim", *shape.flags, ready_s=120))
        urls = {"edge-0": up.url}
        victims = [victim_of(up, name) for name in ("edge-0", "router-0", "nats-server", *worker_names(up))]
        for number in range(1, shape.edges):
            opening = kept_edge(folder, up.nats, f"edge-{number}")
            edge, urls[f"edge-{number}"] = await stack.enter_async_context(opening)
            victims.append(Victim(edge.name, lambda edge=edge: edge.pid))  # type: ignore[misc]
        for number in range(1, shape.routers):
            flags = ("--disaggregate", "always") if shape.prefill else ()
            router = await stack.enter_async_context(kept_router(folder, up.nats, f"router-{number}", *flags))
            victims.append(Victim(router.name, lambda router=router: router.pid))  # type: ignore[misc]
        wanted = {"edge": shape.edges, "router": shape.routers, "worker": shape.all_workers}
        await until_ready(up.nats, wanted, within_s=120)
        clients = {
            name: await stack.enter_async_context(client_of(url)) for name, url in sorted(urls.items())
        }
        ready_s = time.monotonic() - began
        killing = asyncio.create_task(_kill(victims, dice, seconds))
        served: list[Served] = []
        async with asyncio.timeout(seconds + answer_s + END_S_MAX + DRAIN_TIMEOUT_S + CONNECT_S_MAX + 30):
            async with asyncio.TaskGroup() as group:
                for number in range(streams):
                    name = sorted(clients)[number % len(clients)]
                    tokens = int(answer_s * PACE)
                    group.create_task(_ask(clients[name], name, number, tokens, killing, served))
        kills = killing.result()
        ended_s = time.monotonic() - began
        await until_ready(up.nats, wanted, within_s=60)
        for url in urls.values():
            await until_healthy(url, workers=shape.all_workers, within_s=60)
        late = [await succeeds(client, tokens=2 * PACE) for client in clients.values()]
        served_s = time.monotonic() - began
    violations = _judged(served, kills, answer_s)
    violations += [Violation("after the last kill", 1, problem) for problem in late if problem]
    lines = [
        ("seed", str(seed)),
        ("fleet", f"{shape.edges} edges, {shape.routers} routers, {' '.join(shape.flags)}"),
        *_kill_lines(kills),
        ("answers", f"{len(served)} of {int(answer_s * PACE)} tokens, {streams} at a time"),
        *_answer_lines(served),
        ("fleet ready", f"{ready_s:.0f} s"),
        ("answers ended", f"{ended_s:.0f} s"),
        ("all served again", f"{served_s:.0f} s"),
        ("duration", f"{time.monotonic() - began:.0f} s"),
    ]
    return Report("random kills", lines, violations)


def _kill_lines(kills: list[Kill]) -> list[tuple[str, str]]:
    """Lines about what was killed or stopped, and how fast it was gone."""
    by_kind = Counter(kill.name.rpartition("-")[0] or kill.name for kill in kills)
    at_once = [kill.gone_s - kill.at_s for kill in kills if not kill.stopped]
    in_order = [kill.gone_s - kill.at_s for kill in kills if kill.stopped]
    return [
        ("kills", f"{len(kills)}: " + ", ".join(f"{n} {kind}" for kind, n in sorted(by_kind.items()))),
        (
            "of these stopped in order",
            f"{len(in_order)}, gone at most {max(in_order, default=0):.1f} s after it",
        ),
        ("gone at most", f"{max(at_once, default=0):.2f} s after it was killed"),
    ]


def _answer_lines(served: list[Served]) -> list[tuple[str, str]]:
    """Lines about how answers ended."""
    return [
        ("ended with a killed edge", str(sum(one.answer.broken for one in served))),
        ("right", str(sum(not one.answer.problem() for one in served))),
        ("longest token gap", f"{max((one.answer.gap_s for one in served), default=0):.2f} s"),
    ]


async def _kill(victims: list[Victim], dice: random.Random, seconds: float) -> list[Kill]:
    """Kill or stop one at a time in a random order that meets all of them, some twice in a row."""
    kills: list[Kill] = []
    stops: list[asyncio.Task[Kill]] = []
    deck: list[Victim] = []
    victim = dice.choice(victims)
    end_s = time.monotonic() + seconds
    while True:
        pause_s = dice.uniform(*PAUSE_S)
        if time.monotonic() + pause_s > end_s:
            return kills + await asyncio.gather(*stops)
        await asyncio.sleep(pause_s)
        if not (kills or stops) or dice.random() >= AGAIN:
            deck = deck or dice.sample(victims, len(victims))
            victim = deck.pop()
        pid, in_order, number = victim.pid(), dice.random() < STOPPED, dice.choice(STOPS)
        if pid and in_order:
            # NATS's server takes SIGHUP for a request to read its configuration.
            number = signal.SIGTERM if victim.name == "nats-server" else number
            stops.append(asyncio.create_task(_stop(pid, number, victim.name)))
        elif pid:
            at_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            kills.append(Kill(at_s, await gone(pid), victim.name))


async def _stop(pid: int, number: signal.Signals, name: str) -> Kill:
    """Send a signal twice, as a service manager and a parent do, and wait until the process has ended."""
    at_s = time.monotonic()
    os.kill(pid, number)
    await asyncio.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return Kill(at_s, await gone(pid, DRAIN_TIMEOUT_S + CONNECT_S_MAX), name, stopped=True)


async def _ask(
    client: httpx.AsyncClient,
    edge: str,
    number: int,
    tokens: int,
    killing: asyncio.Task[list[Kill]],
    served: list[Served],
) -> None:
    """One answer after the other from one edge, until nothing is killed any more."""
    seed = 1000 * number
    while not killing.done():
        served.append(Served(edge, await _connected(client, seed, tokens)))
        seed += 31


async def _connected(client: httpx.AsyncClient, seed: int, tokens: int) -> Answer:
    """One answer, asked for again while nobody listens at the edge's address."""
    deadline = time.monotonic() + DRAIN_TIMEOUT_S + CONNECT_S_MAX
    while True:
        answer = Answer(seed, tokens)
        try:
            async with asyncio.timeout(tokens / PACE + END_S_MAX):
                await answer.run(client)
        except TimeoutError:
            answer.error = f"not ended within {END_S_MAX:.0f} s more than it takes"
            return answer
        if not answer.refused or time.monotonic() > deadline:
            return answer
        await asyncio.sleep(0.1)


def _judged(served: list[Served], kills: list[Kill], answer_s: float) -> list[Violation]:
    """A broken connection is right only where the edge was killed during the request, or had drained for its whole time; all else has to be whole."""
    found = []
    for edge, answer in served:
        during = [k for k in kills if k.gone_s >= answer.began_s - 0.1 and k.at_s <= answer.ended_s + 0.1]
        problem = answer.problem()
        ended = answer.broken or SHUTTING_DOWN in answer.error
        if not problem or (ended and any(kill.name == edge and kill.ends(answer) for kill in during)):
            continue
        starting = [k for k in kills if k.name == edge and k.gone_s > answer.ended_s - CONNECT_S_MAX]
        if answer.refused and starting:
            continue
        told = (
            ", ".join(
                f"{kill.name}{' (stopped)' * kill.stopped} at {kill.at_s - answer.began_s:.1f} s"
                for kill in during
            )
            or "nothing"
        )
        before = [answer.began_s - k.gone_s for k in kills if k.name == edge and k.gone_s < answer.began_s]
        told += f"; the edge was gone {min(before):.2f} s before" if before else ""
        found.append(Violation("answer", 1, f"{edge}: {problem}; killed meanwhile: {told}"))
    if not any(not answer.problem() for _, answer in served):
        found.append(Violation("test", 1, f"no answer of {answer_s:.0f} s ended right"))
    return found


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long processes are killed")
    parser.add_argument("--seed", type=int, default=0, help="of the order of kills (default: by the clock)")
    parser.add_argument("--edges", type=int, default=3)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--prefill-workers", type=int, default=0)
    parser.add_argument("--decode-workers", type=int, default=0)
    parser.add_argument("--answer-seconds", type=float, default=30.0, help="length of an undisturbed answer")
    given = parser.parse_args()
    seed = given.seed or int(time.time())
    shape = Shape(given.edges, given.routers, given.workers, given.prefill_workers, given.decode_workers)
    return command(
        lambda folder: random_kills(
            folder, seconds=given.seconds, seed=seed, shape=shape, answer_s=given.answer_seconds
        )
    )


if __name__ == "__main__":
    sys.exit(main())
