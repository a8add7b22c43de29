"""Simulated clients: they ask, read their streams to the end or hang up, and remember exactly what they got."""

import asyncio
import random
from typing import Final, Literal

import msgspec

from headwater.actors.edge.http import Headers
from headwater.engines import sim_model
from headwater.ops.sim import crowded
from headwater.ops.sim.fleet import SCRIPT, SimFleet
from headwater.ops.sim.http import Reset
from headwater.ops.sim.loop import VirtualLoop

PREFIXES: Final = 6
PROMPT_TOKENS_MAX: Final = 200
ANSWER_TOKENS: Final = (1, 56)
LONG_ANSWER_TOKENS: Final = (150, 400)
"""At 30 ms a token or more: longer than several renewals of a lease."""

LONG_SHARE: Final = 0.12
HANG_UP_SHARE: Final = 0.1
PATIENCE_S: Final = 90.0
"""A stream that does not end within this time hangs: longer than every deadline of ours together."""

TEXT: Final = sim_model.tokenizer().decode(list(SCRIPT))
"""What the script reads as: one character per token."""

REFUSED: Final = "The request was refused: "
"""How the refusal by a limit of a router's queue begins."""

End = Literal["open", "stop", "error", "refused", "reset", "hung up", "hangs"]


class Told(msgspec.Struct):
    """What one client asked for and got."""

    number: int
    edge: str
    at_s: float
    tokens: int
    seed: int
    streamed: bool
    text: str = ""
    finishes: int = 0
    errors: int = 0
    dones: int = 0
    status: int = 0
    end: End = "open"
    ended_s: float = 0.0
    reason: str = ""
    """The error that it was given."""
    limited: bool = False
    """It was refused by a limit that the run has set: a queue's bound, or a deadline of its own."""

    def expected(self) -> str:
        """The whole answer, as the simulated engine gives it for this seed."""
        return "".join(TEXT[(self.seed + number) % len(TEXT)] for number in range(self.tokens))


class Clients:
    """Asks `count` requests between `from_s` and `until_s`, each by a task of its own."""

    def __init__(
        self, loop: VirtualLoop, fleet: SimFleet, draw: random.Random, wishes: random.Random | None = None
    ) -> None:
        self.told: list[Told] = []
        self._loop = loop
        self._fleet = fleet
        self._draw = draw
        self._wishes = wishes

    async def run(self, count: int, from_s: float, until_s: float) -> None:
        """Ask at random times; returns once each has its end."""
        times = sorted(self._draw.uniform(from_s, until_s) for _ in range(count))
        tasks = []
        for at in times:
            await asyncio.sleep(max(0.0, at - self._loop.time()))
            tasks.append(self._loop.create_task(self.ask(self._draw.choice(self._fleet.edges))))
        await asyncio.gather(*tasks)

    async def ask(self, edge: str, *, patient: bool = False) -> Told:
        """One request. A `patient` client never hangs up."""
        draw = self._draw
        streamed = draw.random() < 0.8
        told = Told(
            len(self.told),
            edge,
            self._loop.time(),
            draw.randint(*(LONG_ANSWER_TOKENS if draw.random() < LONG_SHARE else ANSWER_TOKENS)),
            draw.randrange(1 << 20),
            streamed,
        )
        self.told.append(told)
        prefix = draw.randrange(PREFIXES)
        prompt = [prefix] * (16 * (1 + prefix)) + [draw.randrange(64) for _ in range(draw.randint(1, 80))]
        body = msgspec.json.encode(
            {
                "model": "sim",
                "prompt": prompt[:PROMPT_TOKENS_MAX],
                "max_tokens": told.tokens,
                "seed": told.seed,
                "stream": streamed,
                "ignore_eos": True,
            }
        )
        hang_up_at = draw.randint(1, 40) if not patient and draw.random() < HANG_UP_SHARE else 0
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._read(told, edge, body, hang_up_at, self._headers(patient))
        except TimeoutError:
            told.end = "hangs"
        except Reset:
            told.end = "reset"
        told.ended_s = self._loop.time()
        return told

    def _headers(self, patient: bool) -> Headers:
        return crowded.wishes(self._wishes) if self._wishes is not None and not patient else []

    async def _read(self, told: Told, edge: str, body: bytes, hang_up_at: int, headers: Headers) -> None:
        server = self._fleet.servers.get(edge)
        if server is None:
            raise Reset
        connection = server.connect("/v1/completions", body, headers)
        parts = 0
        data = b""
        try:
            while (part := await connection.part()) is not None:
                told.status = connection.status
                parts += 1
                if told.streamed and told.status == 200:
                    data += part
                    *events, data = data.split(b"\n\n")
                    for event in events:
                        _take_event(told, event)
                else:
                    data += part
                if parts == hang_up_at:
                    told.end = "hung up"
                    return
        finally:
            connection.hang_up()
        told.status = connection.status
        if told.status != 200:
            told.end = "refused"
            failure = msgspec.json.decode(data)["error"] if data else {}
            told.reason = failure.get("message", "")
            told.limited = told.reason.startswith(REFUSED)
        elif not told.streamed:
            [choice] = msgspec.json.decode(data)["choices"]
            told.text, told.finishes, told.end = choice["text"], 1, "stop"
        else:
            told.end = "error" if told.errors else "stop"


def _take_event(told: Told, event: bytes) -> None:
    if not event.startswith(b"data: "):
        return
    payload = event[6:]
    if payload == b"[DONE]":
        told.dones += 1
        return
    document = msgspec.json.decode(payload)
    if "error" in document:
        told.errors += 1
        told.reason = document["error"]["message"]
        return
    for choice in document["choices"]:
        told.text += choice.get("text") or ""
        told.finishes += 1 if choice.get("finish_reason") else 0
