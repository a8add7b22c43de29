"""Two processes of one worker's name: one lives, the other waits for its lease. And what they send, overheard."""

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from headwater.events.jetstream import JetStreamTable
from headwater.schemas import subjects
from headwater.schemas.encoding import UnreadableBatch, decode_batch
from headwater.schemas.events import WorkerJoined
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import GenerateRequest, Sampling
from headwater.schemas.names import pool_name
from tests.durability.workload import NS
from tests.support.processes import zygote

POOL = pool_name("sim", 16)
REQUEST_PERIOD_S = 0.05
PROMPT_TOKENS = 320
ANSWER_TOKENS = 24

_encode = msgspec.msgpack.Encoder().encode


class Wire:
    """Everything that is published on a pool's subjects, whether or not the stream takes it.

    `late` counts, by subject, messages of an epoch below one that was on the wire before: a zombie's tries.
    """

    def __init__(self) -> None:
        self.joined: dict[str, int] = {}
        self.seen: Counter[tuple[str, str, int]] = Counter()
        self.late: Counter[str] = Counter()
        self._highest: dict[str, int] = {}

    async def listen(self, client: Client) -> None:
        """Begin; returns once the server knows."""
        await client.subscribe(subjects.pool_filter(NS, POOL), cb=self._on_message)
        await client.flush()

    async def _on_message(self, message: Msg) -> None:
        try:
            batch = decode_batch(message.data)
        except UnreadableBatch:
            # What an append sends besides batches is none of our business.
            return
        highest = self._highest.get(message.subject, 0)
        if batch.epoch < highest:
            self.late[message.subject] += 1
        self._highest[message.subject] = max(highest, batch.epoch)
        self.seen[batch.writer, subjects.pool_kind(message.subject), batch.epoch] += 1
        for event in batch.events:
            if isinstance(event, WorkerJoined):
                self.joined[event.worker] = max(event.epoch, self.joined.get(event.worker, 0))


class WorkerPair:
    """Two `headwater engine` processes called `name`, with the simulated engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.logs: dict[int, Path] = {}
        self._processes: list[zygote.Process] = []

    async def start(self, url: str, folder: Path) -> None:
        """Start both, with their logs in `folder`."""
        for number in range(2):
            path = folder / f"{self.name}-{number}.log"
            where = ("--nats", url, "--namespace", NS, "--name", self.name)
            with path.open("wb") as output:
                process = await zygote.start(
                    # A small cache: blocks are evicted all the time, so there is always something to write.
                    *("engine", "--engine", "sim", *where, "--sim-blocks", "512", "--log-format", "json"),
                    stdout=output,
                    stderr=zygote.STDOUT,
                )
            self._processes.append(process)
            self.logs[process.pid] = path

    async def holder(self, leases: JetStreamTable) -> int:
        """Process id in the worker's lease; 0 while nobody has it."""
        entry = await leases.get(subjects.lease_key("worker", self.name))
        return int(msgspec.json.decode(entry.value)["pid"]) if entry and entry.value else 0

    def losses(self, pid: int) -> int:
        """How often this process said that it had lost its lease."""
        return self.logs[pid].read_bytes().count(b'"lease_lost"')

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Stop one of the two, or let it go on."""
        os.kill(pid, number)

    async def end(self) -> None:
        """SIGKILL both, stopped or not."""
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def died(self) -> bool:
        """Has one ended by itself?"""
        return any(process.returncode is not None for process in self._processes)


async def ask_for_ever(client: Client, wire: Wire, name: str, dice: random.Random) -> None:
    """Requests to whichever epoch joined last, one after the other. Nobody reads the answers."""
    nowhere = client.new_inbox()
    number = 0
    while True:
        number += 1
        tokens = [dice.randrange(1, 30_000) for _ in range(PROMPT_TOKENS)]
        sampling = Sampling(max_tokens=ANSWER_TOKENS)
        request = GenerateRequest(f"{name}-{number}", "nobody", number, pack_tokens(tokens), sampling)
        epoch = wire.joined.get(name)
        if epoch is not None:
            subject = subjects.engine(NS, name, epoch, "generate")
            await client.publish(subject, _encode(request), reply=nowhere)
        await asyncio.sleep(REQUEST_PERIOD_S)
