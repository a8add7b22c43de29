"""Kills of random processes, and partitions of hosts, under answers of a fleet across hosts: only what a killed edge was serving is lost.

python -m tests.faults.hosts.several_hosts --seconds 1200 --seed 1 --vllm
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from tests.faults.answers import PACE, Answer, succeeds, unserved
from tests.faults.hosts.spread import SIM_POOL, Spread, spread
from tests.faults.kills.victims import gone
from tests.faults.report import Report, Violation, command
from tests.support.network.hosts import network
from tests.support.processes.disaggregated import Tokens, body

HOSTS = ("alpha", "beta", "gamma")

PAUSE_S = (2.0, 8.0)
"""Time from one fault to the next."""

APART_S = (2.0, 12.0)
"""How long a partition lasts."""

KILL, ISOLATE = 0.6, 0.8
"""Below the first a fault is a kill, below the second a host cut off from both others, and else two hosts cut off from each other."""

AGAIN_S = 0.5
"""Pause of a client that was told to come back."""

END_S_MAX = 120.0
"""How much longer than undisturbed an answer may take: two partitions and a restart of vLLM."""

SERVED_S_MAX = 60.0
PROMPT = "Where does the river {number} begin, and which towns does it pass? " * 4
VLLM_PROMPTS = 24
VLLM_TOKENS = 40


class Fault(NamedTuple):
    """Something that was done to the fleet, from when to when."""

    what: str
    name: str
    at_s: float
    ended_s: float


class Asked(NamedTuple):
    """An answer, the edge that was asked for it, and how often the edge had sent the client away before."""

    edge: str
    answer: Answer
    refusals: int


class Shape(NamedTuple):
    """The network, the fleet and the load."""

    servers: int = 3
    workers: int = 4
    vllm: bool = False
    round_trip_s: float = 0.05
    loss: float = 0.001
    answer_s: float = 20.0
    streams: int = 6


DEFAULT = Shape()


async def several_hosts(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    shape: Shape = DEFAULT,
    faults: Sequence[tuple[float, str, float]] | None = None,
) -> Report:
    """Hurt the fleet for `seconds`, at random or as `faults` say (when, what or whom, for how long), and judge each answer."""
    print(f"several hosts: seed {seed}", file=sys.stderr, flush=True)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        net = stack.enter_context(network(folder, *HOSTS, seed=seed))
        up = await stack.enter_async_context(
            spread(folder, net, servers=shape.servers, vllm=shape.vllm, workers=shape.workers)
        )
        clients = {name: await stack.enter_async_context(up.client(name)) for name in up.edges}
        expected = await _expected(clients["edge-0"]) if shape.vllm else []
        ready_s = time.monotonic() - began
        net.shape(round_trip_s=shape.round_trip_s, loss=shape.loss)
        hurting = asyncio.create_task(_Hurt(up, random.Random(seed)).run(seconds, faults))
        served: list[Asked] = []
        exact: list[str] = []
        async with asyncio.timeout(seconds + shape.answer_s + 2 * END_S_MAX):
            async with asyncio.TaskGroup() as group:
                for number in range(shape.streams):
                    name = sorted(clients)[number % len(clients)]
                    group.create_task(_ask(clients[name], name, number, shape, hurting, served))
                if expected:
                    for name in clients:
                        group.create_task(_ask_vllm(up, clients[name], name, expected, hurting, exact))
        done = hurting.result()
        net.heal()
        net.shape()
        ended_s = time.monotonic() - began
        late = [await unserved(partial(succeeds, client), SERVED_S_MAX) for client in clients.values()]
        await up.until_healthy(shape.workers + 2 * shape.vllm)
        handed_over = await _handed_over(up)
        replays = await _replays(up, shape)
        denied = up.denied()
    wrong = _judged(served, done, shape) + [Violation("vllm", 1, text) for text in exact if text]
    wrong += [Violation("after the last fault", 1, problem) for problem in late if problem]
    wrong += [Violation("rights", len(denied), denied[0])] if denied else []
    wrong += _unequal(replays)
    lines = [
        ("seed", str(seed)),
        ("network", f"{1000 * shape.round_trip_s:g} ms round trip, {100 * shape.loss:g} % of frames lost"),
        (
            "fleet",
            f"{len(HOSTS)} hosts with an edge and a router each, {shape.servers} NATS servers, {shape.workers} workers",
        ),
        *_fault_lines(done),
        *_answer_lines(served, exact),
        ("handed over", f"{handed_over} prompts"),
        *((f"replay of {pool}", text) for pool, text in _replay_lines(replays)),
        ("fleet ready", f"{ready_s:.0f} s"),
        ("answers ended", f"{ended_s:.0f} s"),
        ("duration", f"{time.monotonic() - began:.0f} s"),
    ]
    return Report("several hosts", lines, wrong)


class _Hurt:
    """Does one thing after the other to the fleet; partitions end by themselves."""

    def __init__(self, up: Spread, dice: random.Random) -> None:
        self._up = up
        self._dice = dice
        self._faults: list[Fault] = []

    async def run(self, seconds: float, planned: Sequence[tuple[float, str, float]] | None) -> list[Fault]:
        """Hurt for so long; returns what was done."""
        began = time.monotonic()
        if planned is not None:
            for at_s, what, last_s in planned:
                await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
                await (self._cut(what, last_s) if last_s else self._kill(what))
        while planned is None:
            pause_s = self._dice.uniform(*PAUSE_S)
            if time.monotonic() + pause_s + APART_S[1] > began + seconds:
                break
            await asyncio.sleep(pause_s)
            await self._draw()
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        return self._faults

    async def _draw(self) -> None:
        kind, last_s = self._dice.random(), self._dice.uniform(*APART_S)
        if kind < KILL:
            await self._kill(self._dice.choice(self._up.victims()).name)
        elif kind < ISOLATE:
            # Processes die while hosts are apart, too.
            await self._cut(self._dice.choice(self._up.network.hosts).name, last_s)
        else:
            here, there = self._dice.choice(self._up.network.pairs())
            await self._cut(f"{here.name} {there.name}", last_s)

    async def _kill(self, name: str) -> None:
        [victim] = [one for one in self._up.victims() if one.name == name]
        pid, at_s = victim.pid(), time.monotonic()
        if pid:
            os.kill(pid, signal.SIGKILL)
            self._faults.append(Fault("kill", name, at_s, await gone(pid)))

    async def _cut(self, names: str, last_s: float) -> None:
        """Cut one host off from all others, or two from each other; some process may be killed meanwhile."""
        net, at_s = self._up.network, time.monotonic()
        hosts = [host for host in net.hosts if host.name in names.split()]
        if len(hosts) == 1:
            net.isolate(*hosts)
        else:
            net.cut([(hosts[0], hosts[1])])
        await asyncio.sleep(last_s)
        net.heal()
        self._faults.append(Fault("isolated" if len(hosts) == 1 else "cut", names, at_s, time.monotonic()))


async def _ask(
    client: httpx.AsyncClient,
    edge: str,
    number: int,
    shape: Shape,
    hurting: "asyncio.Task[list[Fault]]",
    served: list[Asked],
) -> None:
    """One answer after the other from one edge, until nothing is hurt any more."""
    seed = 1000 * number
    while not hurting.done():
        served.append(await _answered(client, edge, seed, int(shape.answer_s * PACE)))
        seed += 31


async def _answered(client: httpx.AsyncClient, edge: str, seed: int, tokens: int) -> Asked:
    """One answer, asked for again where nobody listens, and where the edge says that it cannot serve now."""
    deadline = time.monotonic() + tokens / PACE + END_S_MAX
    refusals = 0
    while True:
        answer = Answer(seed, tokens, PROMPT.format(number=seed))
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                await answer.run(client)
        except TimeoutError:
            answer.error = f"not ended within {END_S_MAX:.0f} s more than it takes, after {refusals} refusals"
            return Asked(edge, answer, refusals)
        again = answer.refused or answer.status in (429, 503)
        if not again or time.monotonic() > deadline:
            return Asked(edge, answer, refusals)
        refusals += 1
        await asyncio.sleep(AGAIN_S)


async def _expected(client: httpx.AsyncClient) -> list[Tokens]:
    """What vLLM answers while nothing is hurt."""
    found = []
    for number in range(VLLM_PROMPTS):
        tokens, problem = await _vllm_answer(client, number)
        assert not problem, problem
        found.append(tokens)
    assert len(set(found)) == VLLM_PROMPTS, "two prompts have one answer: another one's KV would not show"
    return found


async def _ask_vllm(
    up: Spread,
    client: httpx.AsyncClient,
    edge: str,
    expected: list[Tokens],
    hurting: "asyncio.Task[list[Fault]]",
    exact: list[str],
) -> None:
    """Ask vLLM's workers the same prompts again and again; adds what is wrong with each answer, "" for a right one."""
    number = 0
    while not hurting.done():
        began, deadline = time.monotonic(), time.monotonic() + END_S_MAX
        while True:
            try:
                async with asyncio.timeout(END_S_MAX):
                    tokens, problem = await _vllm_answer(client, number % VLLM_PROMPTS)
            except TimeoutError:
                tokens, problem = (), f"not ended within {END_S_MAX:.0f} s"
                break
            if problem not in (AGAIN, BROKEN) or time.monotonic() > deadline:
                break
            await asyncio.sleep(AGAIN_S)
        if not problem and tokens != expected[number % VLLM_PROMPTS]:
            problem = f"{tokens} and not {expected[number % VLLM_PROMPTS]}"
        exact.append(f"{edge}: {problem} after {time.monotonic() - began:.0f} s" if problem else "")
        number += 1


AGAIN, BROKEN = "told to come back", "the edge was killed"


async def _vllm_answer(client: httpx.AsyncClient, number: int) -> tuple[Tokens, str]:
    """The tokens of a streamed answer, and what is wrong."""
    asked = body(number, VLLM_TOKENS) | {"stream": True}
    found: list[str] = []
    try:
        async with client.stream("POST", "/v1/completions", json=asked) as reply:
            if reply.status_code in (429, 503):
                return (), AGAIN
            if reply.status_code != 200:
                return (), f"status {reply.status_code}: {(await reply.aread()).decode()}"
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                document = msgspec.json.decode(line[6:])
                if "error" in document:
                    return (), str(document["error"])
                for choice in document["choices"]:
                    found += (choice.get("logprobs") or {}).get("tokens") or ()
    except httpx.TransportError:
        return (), BROKEN
    return tuple(found), ""


async def _handed_over(up: Spread) -> int:
    """Prompts in the log whose KV another worker was to fetch."""
    code, output = await up.network.hosts[0].finish("log", "--requests", *up.access)
    assert code == 0, output
    lines = [line for line in output.splitlines() if "RequestPrefilled" in line]
    return int(next(word for word in lines[0].split() if word.isdigit())) if lines else 0


async def _replays(up: Spread, shape: Shape) -> dict[str, list[dict[str, object]]]:
    """Each pool's replay on each host, to the same position."""
    code, output = await up.network.hosts[0].finish("pools", *up.access)
    assert code == 0, output
    pools = [name.partition("_POOL_")[2] for name in output.split() if "_POOL_" in name]
    assert SIM_POOL in pools
    assert len(pools) == 1 + shape.vllm
    found = {}
    for pool in pools:
        [first, *_] = await up.replayed(pool)
        last = first["last"]
        assert isinstance(last, int)
        found[pool] = await up.replayed(pool, last)
    return found


def _unequal(replays: dict[str, list[dict[str, object]]]) -> list[Violation]:
    """Replays that do not make each decision again, or differ from host to host."""
    found = []
    for pool, each in replays.items():
        if not all(one["equal"] for one in each):
            found.append(Violation("replay", 1, f"{pool}: {each}"))
        if any(one["state"] != each[0]["state"] for one in each):
            found.append(Violation("states", 1, f"{pool}: {[one['state'] for one in each]}"))
    return found


def _replay_lines(replays: dict[str, list[dict[str, object]]]) -> list[tuple[str, str]]:
    return [
        (
            pool,
            f"{each[0]['decisions']} decisions, equal on {sum(bool(one['equal']) for one in each)} of {len(each)} hosts, "
            f"state {str(each[0]['state'])[:12]}, {len(each[0]['breaks'])} breaks",  # type: ignore[arg-type]
        )
        for pool, each in replays.items()
    ]


def _fault_lines(faults: list[Fault]) -> list[tuple[str, str]]:
    kills = Counter(fault.name.rpartition("-")[0] for fault in faults if fault.what == "kill")
    apart = [fault for fault in faults if fault.what != "kill"]
    lasted = [fault.ended_s - fault.at_s for fault in apart]
    return [
        ("kills", f"{kills.total()}: " + ", ".join(f"{n} {kind}" for kind, n in sorted(kills.items()))),
        ("a host cut off", str(sum(fault.what == "isolated" for fault in apart))),
        ("two hosts cut off", str(sum(fault.what == "cut" for fault in apart))),
        ("apart", f"{sum(lasted):.0f} s, at most {max(lasted, default=0):.1f} s"),
    ]


def _answer_lines(served: list[Asked], exact: list[str]) -> list[tuple[str, str]]:
    right = [one.answer for one in served if not one.answer.problem()]
    return [
        ("streams", f"{len(served)}, right {len(right)}, {sum(one.tokens for one in right)} tokens"),
        ("ended with a killed edge", str(sum(one.answer.broken for one in served))),
        ("sent away and came back", str(sum(one.refusals for one in served))),
        ("longest stall", f"{max((answer.gap_s for answer in right), default=0):.1f} s"),
        ("vLLM's streams", f"{len(exact)}, right {sum(not text for text in exact)}, of {VLLM_TOKENS} tokens"),
    ]


def _judged(served: list[Asked], faults: list[Fault], shape: Shape) -> list[Violation]:
    """A broken connection is right only where the edge was killed during the request; all else has to be whole."""
    found = []
    for edge, answer, refusals in served:
        problem = answer.problem()
        during = [f for f in faults if f.ended_s >= answer.began_s - 0.1 and f.at_s <= answer.ended_s + 0.1]
        if not problem or (answer.broken and any(f.name == edge for f in during)):
            continue
        told = ", ".join(
            f"{f.what} {f.name} {f.at_s - answer.began_s:.1f} to {f.ended_s - answer.began_s:.1f} s"
            for f in during
        )
        found.append(
            Violation("stream", 1, f"{edge}: {problem}; {refusals} refusals; meanwhile: {told or 'nothing'}")
        )
    if not any(not one.answer.problem() for one in served):
        found.append(Violation("test", 1, f"no answer of {shape.answer_s:.0f} s ended right"))
    return found


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0, help="how long the fleet is hurt")
    parser.add_argument("--seed", type=int, default=0, help="of what is done to it (default: by the clock)")
    parser.add_argument(
        "--vllm", action="store_true", help="with two workers of vLLM, whose KV moves by NIXL"
    )
    parser.add_argument("--round-trip-ms", type=float, default=50.0)
    parser.add_argument("--loss", type=float, default=0.001, help="share of frames lost between hosts")
    given = parser.parse_args()
    seed = given.seed or int(time.time())
    shape = Shape(vllm=given.vllm, round_trip_s=given.round_trip_ms / 1000, loss=given.loss)
    return command(lambda folder: several_hosts(folder, seconds=given.seconds, seed=seed, shape=shape))


if __name__ == "__main__":
    sys.exit(main())
