"""Prompts whose answers show another prompt's KV, asked of a fleet of real engines under kills and cancellations."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import nats
from msgspec.structs import replace
from nats.aio.client import Client

from headwater.schemas import subjects
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import (
    Accepted,
    Cancel,
    GenerateReply,
    GenerateRequest,
    Handoff,
    Leg,
    Refused,
    Sampling,
    TokenFrame,
)
from tests.support.engines.short_vocabulary import SIZE
from tests.support.processes.fleet import FleetProcess

_reply: msgspec.msgpack.Decoder[GenerateReply] = msgspec.msgpack.Decoder(GenerateReply)

AT_ONCE = 12
RETRIES_MAX = 5
ANSWER_TOKENS = 12

Tokens = tuple[str, ...]
Kill = tuple[int, str]
"""After so many answers, a process: a worker by its name, "core of" one for its vLLM's own process, or any by a part of its command line."""


def prompt(number: int) -> list[int]:
    """40 to 120 random tokens; every fourth one begins like another."""
    draw = random.Random(number // 4 * 4 if number % 4 == 0 else number)
    tokens = [draw.randrange(3, SIZE) for _ in range(40 + number % 80)]
    return tokens + [draw.randrange(3, SIZE) for _ in range(number % 4)]


def body(number: int, tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
    """A request at temperature 0 whose answer shows as token ids' texts."""
    return {
        "model": "tiny",
        "prompt": prompt(number),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
    }


async def answer(
    client: httpx.AsyncClient, number: int, tokens: int = ANSWER_TOKENS, worker: str = ""
) -> Tokens:
    """The tokens of one answer, of this worker if one is named. Told to come back later (503), it does; any other error is raised."""
    headers = {"x-headwater-worker": worker} if worker else {}
    for _ in range(RETRIES_MAX):
        reply = await client.post("/v1/completions", json=body(number, tokens), headers=headers)
        if reply.status_code == 503 and "retry-after" in reply.headers:
            await asyncio.sleep(float(reply.headers["retry-after"]))
            continue
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {reply.text}")
        return tuple(reply.json()["choices"][0]["logprobs"]["tokens"])
    raise RuntimeError(f"refused {RETRIES_MAX} times: {reply.text}")


async def answers(up: FleetProcess, count: int, worker: str = "") -> list[Tokens]:
    """All prompts, some at once; of this worker if one is named."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx.AsyncClient, number: int) -> Tokens:
        async with gate:
            return await answer(client, number, worker=worker)

    async with up.client() as client:
        return await asyncio.gather(*(one(client, number) for number in range(count)))


async def under_kills(
    up: FleetProcess, expected: Sequence[Tokens], kills: Sequence[Kill]
) -> list[tuple[int, Tokens | BaseException]]:
    """Ask all prompts while processes are killed and every tenth client leaves. Returns the answers that are wrong."""
    gate = asyncio.Semaphore(AT_ONCE)
    done = 0

    async def one(client: httpx.AsyncClient, number: int) -> Tokens | None:
        nonlocal done
        async with gate:
            try:
                if number % 10 == 9:
                    await leave(client, number)
                    return None
                return await answer(client, number)
            finally:
                done += 1

    async def kill() -> None:
        for after, what in kills:
            while done < after:
                await asyncio.sleep(0.01)
            if what.startswith("core of "):
                await up.kill_engine(what.removeprefix("core of "), "EngineCore")
            elif what.endswith("-0"):
                await up.kill_worker(what)
            else:
                up.kill(what)

    killing = asyncio.ensure_future(kill())
    async with up.client() as client:
        found = await asyncio.gather(
            *(one(client, number) for number in range(len(expected))), return_exceptions=True
        )
    await killing
    return [(number, got) for number, got in enumerate(found) if got is not None and got != expected[number]]


async def leave(client: httpx.AsyncClient, number: int) -> None:
    """A long answer whose client leaves: half of them before the first token, half after it."""
    asked = body(number, 200) | {"stream": True}
    if number % 20 == 9:
        try:
            await client.post("/v1/completions", json=asked, timeout=0.05)
        except httpx.TimeoutException:
            return
    async with client.stream("POST", "/v1/completions", json=asked) as got:
        async for _ in got.aiter_lines():
            break


async def handed_over(up: FleetProcess) -> int:
    """Decode legs in the fleet's log."""
    code, output = await up.command("log", "--requests")
    assert code == 0, output
    [line] = [line for line in output.splitlines() if "RequestPrefilled" in line] or ["RequestPrefilled 0"]
    return int(next(word for word in line.split() if word.isdigit()))


REFUSALS = {
    "another prompt": "other prompt",
    "unknown": "unknown",
    "another life": "is gone",
    "used": "consumed",
    "stale": "released",
}
"""By the way in which a reference is not good: the reason that a decode worker gives."""


class Legs:
    """An edge's side of hand-offs between the workers `prefill-0` and `decode-0`."""

    def __init__(self, client: Client, epochs: dict[str, int]) -> None:
        self._client = client
        self._epochs = epochs
        self._sent = 0

    async def prefill(self, number: int) -> tuple[str, Handoff]:
        """Compute a prompt for another worker; the request's name, and the reference to its KV."""
        frames = await self._client.subscribe(subjects.edge_frames("default", "test"))
        name = f"p-{number}"
        assert await self.give("prefill-0", name, number, "prefill") == Accepted()
        while True:
            message = await frames.next_msg(timeout=30)
            for entry in msgspec.msgpack.decode(message.data, type=TokenFrame).entries:
                if entry.handoff is not None:
                    assert entry.tokens == ()
                    await frames.unsubscribe()
                    return name, entry.handoff

    async def give(
        self, worker: str, name: str, number: int, leg: Leg, handoff: Handoff | None = None
    ) -> Accepted | Refused:
        """Send a leg of a prompt to a worker."""
        self._sent += 1
        sampling = Sampling(4, temperature=0.0, ignore_eos=True)
        tokens = pack_tokens(prompt(number))
        request = GenerateRequest(name, "test", self._sent, tokens, sampling, leg=leg, handoff=handoff)
        subject = subjects.engine("default", worker, self._epochs[worker], "generate")
        reply = await self._client.request(subject, msgspec.msgpack.encode(request), timeout=30)
        return _reply.decode(reply.data)

    async def release(self, name: str) -> None:
        """The client of a prefill leg has left."""
        subject = subjects.engine("default", "prefill-0", self._epochs["prefill-0"], "cancel")
        await self._client.publish(subject, msgspec.msgpack.encode(Cancel((name,))))


async def refused_references(up: FleetProcess) -> dict[str, str]:
    """Give a decode worker references that are not good, and one that is; the reason of each refusal, as in `REFUSALS`."""
    stats = await up.until(
        "both workers", lambda stats: {"prefill-0", "decode-0"} <= {s["id"] for s in stats if s.get("epoch")}
    )
    client = await nats.connect(up.nats)
    try:
        legs = Legs(client, {s["id"]: s["epoch"] for s in stats if "epoch" in s})
        _, good = await legs.prefill(900)
        left, stale = await legs.prefill(901)
        await legs.release(left)
        # The blocks of the released prompt are given to others.
        await asyncio.gather(*(legs.give("prefill-0", f"o-{n}", 910 + n, "prefill") for n in range(4)))
        asked = [
            ("another prompt", 902, good),
            ("unknown", 900, replace(good, id="unknown")),
            ("another life", 900, replace(good, epoch=good.epoch + 1_000_000)),
            ("good", 900, good),
            ("used", 900, good),
            ("stale", 901, stale),
        ]
        found: dict[str, str] = {}
        for what, number, handoff in asked:
            reply = await legs.give("decode-0", f"d-{what}", number, "decode", handoff)
            if what == "good":
                assert reply == Accepted()
                continue
            assert isinstance(reply, Refused), what
            assert (reply.retryable, reply.spent) == (True, True), what
            known = [reason for reason in REFUSALS.values() if reason in reply.reason]
            found[what] = known[0] if known else reply.reason
        for n in range(4):
            await legs.release(f"o-{n}")
        await legs.release("p-900")
        return found
    finally:
        await client.close()
