"""Prompts whose answers show another prompt's KV, asked of a fleet of real engines under kills and cancellations."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import httpx

from tests.support.processes.fleet import FleetProcess

AT_ONCE = 12
RETRIES_MAX = 5
ANSWER_TOKENS = 12

Tokens = tuple[str, ...]
Kill = tuple[int, str]
"""After so many answers, a process: a worker by its name, or any by a part of its command line."""


def prompt(number: int) -> list[int]:
    """40 to 120 random tokens; every fourth one begins like another."""
    draw = random.Random(number // 4 * 4 if number % 4 == 0 else number)
    tokens = [draw.randrange(3, 49_000) for _ in range(40 + number % 80)]
    return tokens + [draw.randrange(3, 49_000) for _ in range(number % 4)]


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


async def answer(client: httpx.AsyncClient, number: int, tokens: int = ANSWER_TOKENS) -> Tokens:
    """The tokens of one answer. Told to come back later (503), it does; any other error is raised."""
    for _ in range(RETRIES_MAX):
        reply = await client.post("/v1/completions", json=body(number, tokens))
        if reply.status_code == 503 and "retry-after" in reply.headers:
            await asyncio.sleep(float(reply.headers["retry-after"]))
            continue
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {reply.text}")
        return tuple(reply.json()["choices"][0]["logprobs"]["tokens"])
    raise RuntimeError(f"refused {RETRIES_MAX} times: {reply.text}")


async def answers(up: FleetProcess, count: int) -> list[Tokens]:
    """All prompts, some at once."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx.AsyncClient, number: int) -> Tokens:
        async with gate:
            return await answer(client, number)

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
            if what.endswith("-0"):
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
