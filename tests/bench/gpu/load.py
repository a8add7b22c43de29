"""The load of the serving benchmark, and its HTTP client.

A closed loop: `streams` concurrent clients, each sending `rounds` requests with new random prompts. Clients run in
processes of their own that reply to a `Load` with a `LoadResult`.
"""

import asyncio
import random
import string
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection as Pipe
from typing import NamedTuple

import msgspec

SYMBOLS = string.ascii_letters + string.digits
"""The alphabet of prompts: with the tokenizer of `gpu.model`, one token per character."""


FIRST_ID = 3
"""First id of that tokenizer's characters, for prompts given as ids."""


class Load(NamedTuple):
    """The requests to send. Tokens are per request; `seed` makes prompts that were not sent before."""

    streams: int
    rounds: int
    prompt_tokens: int
    tokens: int
    seed: int


class TokenGap(NamedTuple):
    """A wait for a next token, and when it ended (`time.monotonic`)."""

    took_s: float
    until_s: float


class Sample(NamedTuple):
    """One request: seconds to its first token and to its end, its tokens, and their arrival times.

    `came_s` are times of `time.monotonic`, from the first token on; tokens that arrived together have one.
    """

    first_s: float
    total_s: float
    tokens: int
    came_s: Sequence[float] = ()

    def gaps(self) -> list[TokenGap]:
        """Its waits for tokens."""
        return [TokenGap(later - sooner, later) for sooner, later in pairwise(self.came_s)]


class LoadResult(NamedTuple):
    """All requests of a load, and when the first started and the last ended (`time.monotonic`, seconds)."""

    samples: list[Sample]
    began_s: float
    ended_s: float


Request = Callable[[int, random.Random], Awaitable[Sample]]


async def run(load: Load, request: Request) -> LoadResult:
    """Run a load; `request(stream, random)` sends one request."""
    began_s = time.monotonic()

    async def stream(number: int) -> list[Sample]:
        draw = random.Random(f"{load.seed} {number}")
        return [await request(number, draw) for _ in range(load.rounds)]

    samples = await asyncio.gather(*(stream(number) for number in range(load.streams)))
    return LoadResult([sample for each in samples for sample in each], began_s, time.monotonic())


def http(pipe: Pipe, host: str, port: int, model: str) -> None:
    """Body of a client process: runs each `Load` until it receives None."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while (load := pipe.recv()) is not None:
            pipe.send(runner.run(_http(load, host, port, model)))


async def _http(load: Load, host: str, port: int, model: str) -> LoadResult:
    streams = [await asyncio.open_connection(host, port, limit=1 << 20) for _ in range(load.streams)]

    async def request(number: int, draw: random.Random) -> Sample:
        body = {
            "model": model,
            "prompt": "".join(draw.choices(SYMBOLS, k=load.prompt_tokens)),
            "max_tokens": load.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sample, received = await stream(*streams[number], msgspec.json.encode(body))
        prompt_tokens = _count(received, b'"prompt_tokens":')
        if (sample.tokens, prompt_tokens) != (load.tokens, load.prompt_tokens):
            raise RuntimeError(f"asked {load}, got {prompt_tokens} prompt tokens and {sample.tokens} tokens")
        return sample

    try:
        return await run(load, request)
    finally:
        for _, writer in streams:
            writer.close()


async def stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
) -> tuple[Sample, bytes]:
    """Send a streamed completion that asks for its usage, and return its times and all that came after the headers.

    Raises `RuntimeError` for an error status.
    """
    began = time.monotonic()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    headers = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in headers.split(b"\r\n", 1)[0]:
        raise RuntimeError(headers.decode() + (await reader.read(2000)).decode(errors="replace"))
    # The headers may arrive before the first token; the first text does not.
    received, came = bytearray(), array("d")
    while not received.endswith(b"0\r\n\r\n"):
        piece = await reader.read(1 << 18)
        if not piece:
            raise RuntimeError("the stream was truncated")
        received += piece
        if came or b'"text":"' in received:
            came.append(time.monotonic())
    tokens = _count(received, b'"completion_tokens":')
    return Sample(came[0] - began, time.monotonic() - began, tokens, came), bytes(received)


def _count(received: bytes | bytearray, name: bytes) -> int:
    tail = bytes(received.rpartition(name)[2])
    return int(tail[: len(tail) - len(tail.lstrip(string.digits.encode()))] or 0)
