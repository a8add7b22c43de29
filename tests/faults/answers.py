"""Streamed answers with the time of every piece, and what each should have been."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

import httpx
import msgspec

from headwater.engines.sim.model import SENTENCES
from tests.support.ports.waiting import eventually

PROMPT = "hello there"
TOKENS_A_SECOND_MAX = 1000 / 5.74
"""The simulated engine's fastest pace for one answer: its step takes at least 5.74 ms."""

PACE = 150
"""Tokens a second that an answer has at least on a machine that is not overloaded."""


def expected(seed: int, tokens: int) -> str:
    """The undisturbed answer of the simulated engine: its text from a place that depends on the seed, repeated."""
    repeats = (seed + tokens) // len(SENTENCES) + 1
    return (SENTENCES * repeats)[seed : seed + tokens]


def request_body(seed: int, tokens: int, prompt: str = PROMPT) -> dict[str, Any]:
    """The body of a completion request that generates exactly so many tokens."""
    return {"model": "sim", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": seed}


class Answer:
    """One streamed completion: its text so far, when each piece came, and how it ended.

    `error` is empty unless the connection broke or an error object came. `broken` says that the connection broke,
    `refused` that there never was one.
    """

    def __init__(self, seed: int, tokens: int, prompt: str = PROMPT) -> None:
        self.seed = seed
        self.tokens = tokens
        self.prompt = prompt
        self.text = ""
        self.finish = ""
        self.usage = 0
        self.status = 0
        self.worker = ""
        self.request = ""
        self.error = ""
        self.broken = False
        self.refused = False
        self.began_s = time.monotonic()
        self.ended_s = 0.0
        self.arrivals: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def start(self, client: httpx.AsyncClient) -> "Answer":
        """Send the request in the background; `settle` waits for its end."""
        self._task = asyncio.create_task(self.run(client))
        return self

    @property
    def done(self) -> bool:
        """Has it ended, in whatever way?"""
        return self.ended_s > 0

    @property
    def gap_s(self) -> float:
        """Longest time between two pieces, up to the end, or up to now while it runs."""
        if not self.arrivals:
            return 0.0
        last = [] if self.finish else [self.ended_s or time.monotonic()]
        return max((b - a for a, b in pairwise([*self.arrivals, *last])), default=0.0)

    @property
    def silent_s(self) -> float:
        """Time since the last piece, or since the request while there was none."""
        return time.monotonic() - (self.arrivals[-1] if self.arrivals else self.began_s)

    @property
    def lasted_s(self) -> float:
        """From the request to its end."""
        return (self.ended_s or time.monotonic()) - self.began_s

    async def run(self, client: httpx.AsyncClient) -> None:
        """Send the request and read its answer to the end. Problems are kept in `error`, not raised."""
        body = request_body(self.seed, self.tokens, self.prompt)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        self.began_s = time.monotonic()
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                self.status = response.status_code
                self.worker = response.headers.get("x-headwater-worker", "")
                self.request = response.headers.get("x-request-id", "")
                if response.status_code != 200:
                    self.error = (await response.aread()).decode()
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(msgspec.json.decode(line[6:]))
        except httpx.TransportError as error:
            self.broken = True
            self.refused = isinstance(error, httpx.ConnectError)
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.ended_s = time.monotonic()

    def _take(self, document: dict[str, Any]) -> None:
        if "error" in document:
            self.error = str(document["error"])
            return
        self.usage = (document.get("usage") or {}).get("completion_tokens", self.usage)
        for choice in document["choices"]:
            self.finish = choice["finish_reason"] or self.finish
            if choice["text"]:
                self.text += choice["text"]
                self.arrivals.append(time.monotonic())

    def problem(self) -> str:
        """What is wrong with the answer; empty if it ended and is what an undisturbed run gives."""
        told = f"request {self.request or '?'} (seed {self.seed}) at {self.worker or 'no worker'}"
        if not self.done:
            return (
                f"{told}: still open after {self.lasted_s:.1f} s, "
                f"{len(self.text)} of {self.tokens} tokens, the last {self.silent_s:.1f} s ago"
            )
        if self.error:
            return f"{told}: status {self.status} after {len(self.text)} tokens and {self.lasted_s:.1f} s: {self.error[:400]}"
        wanted = expected(self.seed, self.tokens)
        if self.text != wanted:
            same = next((n for n, (a, b) in enumerate(zip(self.text, wanted)) if a != b), len(self.text))
            return f"{told}: {len(self.text)} of {self.tokens} tokens, equal up to {same}, finish {self.finish!r}"
        if (self.finish, self.usage) != ("length", self.tokens):
            return f"{told}: finish {self.finish!r} with {self.usage} tokens counted"
        return ""

    def cancel(self) -> None:
        """Give up waiting."""
        if self._task is not None:
            self._task.cancel()


def start(client: httpx.AsyncClient, number: int, tokens: int, *, first_seed: int = 0) -> list[Answer]:
    """Start so many answers at once, each with another text."""
    return [Answer(first_seed + 23 * n, tokens).start(client) for n in range(number)]


async def under_way(answers: Sequence[Answer], tokens: int = 50, within_s: float = 30) -> None:
    """Wait until every answer has so many tokens, or has ended."""
    await eventually(lambda: all(a.done or len(a.text) >= tokens for a in answers), within_s=within_s)


async def settle(answers: Sequence[Answer], stalled_s: float) -> list[str]:
    """Wait until all have ended, or one had no token for so long; returns what is wrong with each not right."""
    while not all(a.done for a in answers) and all(a.done or a.silent_s < stalled_s for a in answers):
        await asyncio.sleep(0.05)
    problems = [problem for answer in answers if (problem := answer.problem())]
    for answer in answers:
        answer.cancel()
    return problems


async def succeeds(client: httpx.AsyncClient, tokens: int = 8, seed: int = 5) -> str:
    """One request without streaming; returns what is wrong with its answer."""
    try:
        answer = await client.post("/v1/completions", json=request_body(seed, tokens))
    except httpx.TransportError as error:
        return f"{type(error).__name__}: {error}"
    if answer.status_code != 200:
        return f"status {answer.status_code}: {answer.text[:400]}"
    text = answer.json()["choices"][0]["text"]
    return "" if text == expected(seed, tokens) else f"not the undisturbed answer: {text!r}"


async def unserved(attempt: Callable[[], Awaitable[str]], within_s: float) -> str:
    """Repeat an attempt until nothing is wrong with it; returns what was wrong with the last one after `within_s`."""
    ended, problem = 0, "no attempt ended"
    try:
        async with asyncio.timeout(within_s):
            while problem := await attempt():
                ended += 1
                await asyncio.sleep(0.1)
    except TimeoutError:
        return f"no request succeeded within {within_s} s; {ended} failed, the last: {problem}"
    return ""


class _Transport(httpx.AsyncHTTPTransport):
    """A connection that ends before it could be used was never there, as far as a request is concerned."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As httpx does, but for one error of anyio: uvloop has no socket any more that it could ask for its peer."""
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            if error.name != "getpeername":
                raise
            raise httpx.ConnectError("the connection was lost as soon as it was made") from error


def client_of(url: str) -> httpx.AsyncClient:
    """An HTTP client that waits for as long as the test does."""
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(120.0), transport=_Transport())
