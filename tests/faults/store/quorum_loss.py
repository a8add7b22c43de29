"""Two of three servers are killed under long answers: tokens flow without the log, and all goes on behind it.

python -m tests.faults.store.quorum_loss --seconds 20
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

import httpx
from nats.aio.client import Client

from headwater.events.jetstream import connect
from headwater.events.jetstream.api import api
from headwater.events.jetstream.streams import stream_names
from headwater.events.ports import LogError
from headwater.schemas import subjects
from tests.faults.answers import PACE, Answer, client_of, settle, start, succeeds, under_way, unserved
from tests.faults.report import Report, Violation, command
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.servers.nats import NatsServer
from tests.support.servers.nats_cluster import READY_S, NatsCluster

Meanwhile = Literal["nothing", "a worker joins", "a router restarts", "a hand-off is open"]

GAP_S_MAX = 3.0
"""Longest time without a token, over the loss and the return of the quorum."""

MOVED_GAP_S_MAX = 10.0
"""The same for the streams of a worker that was killed too: they are given to another one."""

FIRST_TOKEN_S_MAX = 20.0
"""How long a request waits for its first token whose hand-off was open when the quorum was lost."""

UNARY_S_MAX = 5.0
SERVED_S_MAX = 10.0
STALLED_S_MAX = 30.0
"""A stream without a token for so long is given up."""

AROUND_S = 8.0
"""Answers last so much longer than an outage."""

LONG_PROMPT: Final = "Where does a river begin? " * 2000
"""The simulated engine computes it for more than a second, and hands it over for a third of one."""

SPLIT = ("--prefill-workers", "1", "--decode-workers", "1", "--disaggregate", "always")


class Unary(NamedTuple):
    """A request without streaming during the outage."""

    took_s: float
    problem: str


async def quorum_loss(
    folder: Path,
    *,
    meanwhile: Meanwhile = "nothing",
    outage_s: float = 20.0,
    streams: int = 8,
    survivor_leads: bool = True,
) -> Report:
    """One outage. Answers last from before it to well after it.

    `survivor_leads`: the third server was the leader of every stream, and else of none that leases or requests are in.
    """
    flags = SPLIT if meanwhile == "a hand-off is open" else ("--workers", "2")
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(NatsCluster(folder))
        admin = await connect(cluster.url, "test")
        stack.push_async_callback(admin.close)
        await cluster.until_ready(admin)
        folder_of_fleet = folder / "fleet"
        folder_of_fleet.mkdir()
        wanted = ("--engine", "sim", "--nats", cluster.url, "--replicas", "3", *flags)
        up = await stack.enter_async_context(fleet(folder_of_fleet, *wanted, ready_s=90))
        client = await stack.enter_async_context(client_of(up.url))
        outage = _Outage(cluster, admin, up, client, meanwhile, streams)
        return await outage.run(outage_s, survivor_leads=survivor_leads)


class _Outage:
    """Two of three servers away, once."""

    def __init__(
        self,
        cluster: NatsCluster,
        admin: Client,
        up: FleetProcess,
        client: httpx.AsyncClient,
        meanwhile: Meanwhile,
        streams: int,
    ) -> None:
        self._cluster = cluster
        self._admin = admin
        self._up = up
        self._client = client
        self._meanwhile = meanwhile
        self._streams = streams
        self._opened: list[Answer] = []
        self._killed = ""

    async def run(self, seconds: float, *, survivor_leads: bool) -> Report:
        """Lose the quorum, ask, get it back, and judge what clients saw."""
        # From here on the router knows both workers.
        assert not await unserved(lambda: succeeds(self._client), within_s=SERVED_S_MAX)
        survivor = self._cluster.servers[2]
        if survivor_leads:
            await _lead_all(self._cluster, self._admin, survivor)
        else:
            survivor = await _follower(self._cluster, self._admin)
        lost = [server for server in self._cluster.servers if server is not survivor]
        tokens = int((seconds + AROUND_S) * PACE)
        answers = start(self._client, self._streams, tokens)
        await under_way(answers)
        await self._change()
        for server in lost:
            server.kill()
        began = time.monotonic()
        unary = await _asked_for(self._client, seconds)
        flowing = [answer for answer in answers if not answer.done]
        await asyncio.gather(*(server.restart() for server in lost))
        back = time.monotonic()
        refused = await unserved(lambda: succeeds(self._client), within_s=SERVED_S_MAX)
        served_s = time.monotonic() - back
        problems = await settle([*answers, *self._opened], stalled_s=STALLED_S_MAX)
        violations = [Violation("stream", len(problems), problems[0])] if problems else []
        violations += [Violation("refused after the outage", 1, refused)] * bool(refused)
        violations += _gaps(answers, self._killed) + _first_tokens(self._opened)
        failed = [one for one in unary if one.problem or one.took_s > UNARY_S_MAX]
        # Without a router there is nobody to choose a worker, and its next life can not read the log.
        if self._meanwhile != "a router restarts" and (failed or not unary):
            violations.append(Violation("request during the outage", len(failed), str(failed[:1])))
        if not flowing:
            violations.append(Violation("test", 1, "every answer ended before the quorum was back"))
        violations += await _all_alive(self._up)
        lines = [
            ("meanwhile", self._meanwhile),
            ("the third server leads", "every stream" if survivor_leads else "nothing that matters"),
            ("without quorum", f"{back - began:.1f} s"),
            ("streams", f"{len(answers)} of {tokens} tokens, and {len(self._opened)} with an open hand-off"),
            ("longest token gap", f"{max(answer.gap_s for answer in answers):.2f} s"),
            ("requests during the outage", f"{len(unary)}, {sum(not one.problem for one in unary)} right"),
            ("slowest of them", f"{max((one.took_s for one in unary), default=0):.2f} s"),
            ("new request served after", f"{served_s:.2f} s"),
        ]
        return Report("quorum loss: three servers, two killed at once", lines, violations)

    async def _change(self) -> None:
        """What happens just before the quorum is lost."""
        match self._meanwhile:
            case "a worker joins":
                self._up.kill("--name worker-0")
                self._killed = "worker-0"
            case "a router restarts":
                self._up.kill(" router ")
            case "a hand-off is open":
                self._opened = [
                    Answer(7 + n, 300, f"{n} {LONG_PROMPT}").start(self._client) for n in range(4)
                ]
                # At the prefill worker for seconds: nothing is told to a client before the second worker begins.
                wanted = self._streams + len(self._opened)
                await self._up.until(
                    "every request at the edge",
                    lambda stats: any(one.get("active_requests", 0) >= wanted for one in stats),
                )


async def _follower(cluster: NatsCluster, admin: Client) -> NatsServer:
    """A server that leads neither the leases nor the request log."""
    names = (f"KV_{subjects.lease_bucket('default')}", subjects.request_stream("default"))
    leaders = [await cluster.leader(admin, name) for name in names]
    return next(server for server in cluster.servers if server not in leaders)


async def _lead_all(cluster: NatsCluster, admin: Client, survivor: NatsServer) -> None:
    """Give the lead of every stream to one server: without quorum it takes messages that it can not store."""
    name = f"n{cluster.servers.index(survivor)}"
    for stream in await stream_names(admin, ""):
        async with asyncio.timeout(READY_S):
            while await cluster.leader(admin, stream) is not survivor:
                await cluster.until_current(admin, stream)
                with contextlib.suppress(LogError):
                    await api(admin, f"STREAM.LEADER.STEPDOWN.{stream}", {"placement": {"preferred": name}})


async def _asked_for(client: httpx.AsyncClient, seconds: float) -> list[Unary]:
    """Requests one after the other for so long; the last one under way is waited for, at most twice its bound."""
    done: list[Unary] = []
    began = time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0:
        start_s = time.monotonic()
        try:
            async with asyncio.timeout(max(left, 2 * UNARY_S_MAX)):
                problem = await succeeds(client)
        except TimeoutError:
            problem = f"not answered within {time.monotonic() - start_s:.1f} s"
        done.append(Unary(time.monotonic() - start_s, problem))
        await asyncio.sleep(min(1.0, max(0.0, began + seconds - time.monotonic())))
    return done


def _gaps(answers: list[Answer], killed: str) -> list[Violation]:
    found = []
    for answer in answers:
        most = MOVED_GAP_S_MAX if answer.worker == killed else GAP_S_MAX
        if answer.gap_s > most:
            found.append(f"seed {answer.seed} at {answer.worker}: {answer.gap_s:.2f} s without a token")
    return [Violation("token gap", len(found), found[0])] if found else []


def _first_tokens(opened: list[Answer]) -> list[Violation]:
    late = [a for a in opened if not a.arrivals or a.arrivals[0] - a.began_s > FIRST_TOKEN_S_MAX]
    return [Violation("open hand-off", len(late), late[0].problem() or "late")] if late else []


async def _all_alive(up: FleetProcess) -> list[Violation]:
    """Every actor answers again."""
    wanted = {"headwater-edge": 1, "headwater-router": 1, "headwater-worker": 2}

    def there(stats: list[dict[str, object]]) -> bool:
        ready = [one["name"] for one in stats if one.get("state", "ready") == "ready"]
        return all(ready.count(name) == number for name, number in wanted.items())

    try:
        await up.until("every actor is ready", there, within_s=20)
    except AssertionError as error:
        return [Violation("actor missing", 1, str(error)[:1500])]
    return []


def main() -> int:
    """The long form: every variant in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the quorum is away")
    parser.add_argument("--meanwhile", choices=get_args(Meanwhile), action="append")
    given = parser.parse_args()
    chosen: Sequence[Meanwhile] = given.meanwhile or get_args(Meanwhile)
    return max(
        command(partial(quorum_loss, meanwhile=one, outage_s=given.seconds, survivor_leads=leads))
        for one in chosen
        for leads in (True, False)
    )


if __name__ == "__main__":
    sys.exit(main())
