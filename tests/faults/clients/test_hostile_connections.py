"""Connections that send too much, too little or too slowly: none harms the requests beside it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.faults.clients.requests import (
    BODY_S,
    HEADER_S,
    LONG,
    SERVED_S,
    SMALL,
    ask,
    edge_bytes,
    encoded,
    refusal,
    until_idle,
)
from tests.support.clients import raw_http
from tests.support.marks import CLIENTS
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [*CLIENTS, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(120)]

LATE_S = 15.0
"""What a loaded machine may add to a timeout."""

SILENT = 1_000
FLOOD_BYTES = 400 * 1024 * 1024


async def test_silent_and_slow_connections_are_closed(up: FleetProcess) -> None:
    """1,000 of them, that send nothing or a byte now and then, are gone soon; others are served meanwhile."""
    beginnings = (b"", b"P", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")
    held: list[raw_http.Connection] = []
    began = time.monotonic()
    try:
        for number in range(SILENT):
            # From many addresses: what is tested here is time, not number.
            held.append(await raw_http.connect(up.url, source=f"127.0.1.{number % 100 + 1}"))
            await held[-1].send(beginnings[number % 3])
        opened = time.monotonic()
        seconds = await ask(up.url)

        async def drip() -> None:
            while True:
                await asyncio.sleep(0.2)
                for client in held[2::3]:
                    if not client.writer.is_closing():
                        client.writer.write(b"a")

        dripping = asyncio.create_task(drip())
        try:
            closing = [client.closed(opened + HEADER_S + LATE_S - time.monotonic()) for client in held]
            ends = await asyncio.gather(*closing, return_exceptions=True)
        finally:
            dripping.cancel()
            await asyncio.gather(dripping, return_exceptions=True)
    finally:
        for client in held:
            client.reset()
    left = sum(isinstance(end, TimeoutError) for end in ends)
    assert left == 0, f"{left} of {SILENT} connections are open after {time.monotonic() - began:.0f} s"
    assert seconds < SERVED_S
    assert await ask(up.url) < SERVED_S
    # Who began a request is told why it ended.
    told = [end for end in ends[2::3] if isinstance(end, bytes) and end]
    for end in told:
        assert end.startswith(b"HTTP/1.1 408"), end[:100]


@pytest.mark.parametrize("dripping", [False, True], ids=["silent", "dripping"])
async def test_a_body_that_does_not_come_is_given_up(up: FleetProcess, dripping: bool) -> None:
    """A body that stops is answered with 408, and so is one that comes a byte at a time."""
    async with raw_http.connection(up.url) as client:
        await client.send(raw_http.request(b'{"model"', length="100000"))

        async def drip() -> None:
            while await client.send(b" "):
                await asyncio.sleep(BODY_S / 4)

        task = asyncio.create_task(drip()) if dripping else None
        try:
            await refusal(client, 408, within_s=BODY_S + LATE_S)
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
    await until_idle(up)


async def test_a_body_that_comes_steadily_is_taken(up: FleetProcess) -> None:
    """The timeout is not for the whole of a body: one of some 13 KB/s may take longer."""
    body = encoded(SMALL) + b" " * 40_000
    steps = 10
    async with raw_http.connection(up.url) as client:
        await client.send(raw_http.request(b"", length=str(len(body))))
        for step in range(steps):
            await asyncio.sleep(1.5 * BODY_S / steps)
            await client.send(body[len(body) * step // steps : len(body) * (step + 1) // steps])
        assert (await client.answer()).status == 200


async def test_an_idle_connection_is_kept_for_the_next_request(up: FleetProcess) -> None:
    """The header's timeout begins with the connection or with a request's first byte, not with the end of an answer."""
    async with raw_http.connection(up.url) as client:
        for pause_s in (0.0, HEADER_S + 1.0):
            await asyncio.sleep(pause_s)
            await client.send(raw_http.request(encoded(SMALL)))
            assert (await client.answer()).status == 200


async def test_an_endless_pipeline_is_not_read_ahead(up: FleetProcess) -> None:
    """Requests behind a running one wait in the client's socket, not in the edge."""
    before = edge_bytes(up)
    flood = raw_http.request(encoded(SMALL, prompt="a" * 1_000)) * 1_000
    async with raw_http.connection(up.url) as client:
        await client.send(raw_http.request(encoded(LONG, stream=True)))
        status, _ = await client.head()
        assert status == 200
        sending = [asyncio.create_task(client.send(flood)) for _ in range(60)]
        await asyncio.wait(sending, timeout=2)
        assert edge_bytes(up) < before + 32 * 1024 * 1024
        assert await ask(up.url) < SERVED_S
        for task in sending:
            task.cancel()
        client.reset()
        await asyncio.gather(*sending, return_exceptions=True)
    await until_idle(up)


async def test_an_endless_header_is_cut_off(up: FleetProcess) -> None:
    """Of 400 MB only the first few KB are read: 431 in OpenAI's format, and nobody else waits."""
    before = edge_bytes(up)
    sent = 0

    def flood() -> Iterator[bytes]:
        nonlocal sent
        yield b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-filler: "
        while sent < FLOOD_BYTES:
            yield b"a" * 65_536
            sent += 65_536

    flooding = asyncio.create_task(asyncio.to_thread(raw_http.exchange, up.url, flood(), 30.0))
    seconds = [await ask(up.url) for _ in range(3)]
    answer, _ = await flooding
    assert answer is not None
    assert answer.status == 431
    assert answer.error()["type"] == "invalid_request_error"
    assert sent < FLOOD_BYTES // 8
    assert max(seconds) < SERVED_S
    assert edge_bytes(up) < before + 64 * 1024 * 1024


async def test_connections_are_limited(tmp_path: Path) -> None:
    """Per address and in total: one more is refused at once, in OpenAI's format, and a closed one makes room."""
    limits = ("--http-limits", "connections_per_address_max=8,connections_max=20")
    async with fleet(tmp_path, "--engine", "sim", "--workers", "1", *limits) as up, AsyncExitStack() as held:

        async def hold(source: str, count: int) -> list[raw_http.Connection]:
            made = []
            for _ in range(count):
                client = await raw_http.connect(up.url, source=source)
                held.callback(client.close)
                # A whole request and its answer: it counts for certain.
                await client.send(raw_http.request(b"", "/live", method="GET"))
                assert (await client.answer(5)).status == 200
                made.append(client)
            return made

        async def refused(source: str) -> bool:
            async with raw_http.connection(up.url, source=source) as client:
                await client.send(raw_http.request(b"", "/live", method="GET"))
                try:
                    answer = await client.answer(5)
                except raw_http.Closed:
                    return True
                if answer.status == 200:
                    return False
                assert answer.status in (429, 503), answer.body
                assert int(answer.headers["retry-after"]) >= 1
                answer.error()
                return True

        first = await hold("127.0.0.11", 8)
        assert await refused("127.0.0.11")
        await hold("127.0.0.12", 8)
        await hold("127.0.0.13", 4)
        assert await refused("127.0.0.14")
        first[0].close()
        async with asyncio.timeout(5):
            while await refused("127.0.0.14"):
                await asyncio.sleep(0.05)
