"""Connections that send too much, too little, too slowly, nonsense, or leave: none harms the requests beside it."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tests.support.clients import raw_http
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(120),
]

PATH = "/v1/completions"
HEADER_S = 2.0
BODY_S = 2.0
LATE_S = 4.0
"""What a loaded machine may add to a timeout."""

SERVED_S = 5.0
SILENT = 1_000
HEADER_BYTES_MAX = 64 * 1024
HEADERS_MAX = 128
FLOOD_BYTES = 400 * 1024 * 1024

SMALL: dict[str, Any] = {"model": "sim", "prompt": "hello there", "max_tokens": 4, "ignore_eos": True}
LONG: dict[str, Any] = {**SMALL, "max_tokens": 20_000}


def encoded(body: dict[str, Any], **more: Any) -> bytes:
    """A body as bytes."""
    return msgspec.json.encode({**body, **more})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """Two simulated workers behind an edge with short timeouts."""
    flags = ("--engine", "sim", "--header-timeout-s", str(HEADER_S), "--body-timeout-s", str(BODY_S))
    async with fleet(tmp_path_factory.mktemp("hostile"), *flags) as made:
        yield made


async def ask(url: str, *, source: str = "127.0.0.2", within_s: float = 20.0) -> float:
    """A small request on a connection of its own; seconds until its whole answer was there."""
    began = time.monotonic()
    async with raw_http.connection(url, source=source) as client:
        await client.send(raw_http.request(encoded(SMALL)))
        answer = await client.answer(within_s)
    assert answer.status == 200, answer.body
    assert msgspec.json.decode(answer.body)["usage"]["completion_tokens"] == 4
    return time.monotonic() - began


async def until_idle(up: FleetProcess, within_s: float = 3.0) -> None:
    """No request, no stream and nothing in an engine."""
    await up.until(
        "nothing is left of what clients gave up",
        lambda stats: (
            not any(
                one.get("active_requests") or one.get("streams") or one.get("running") or one.get("waiting")
                for one in stats
            )
        ),
        within_s=within_s,
    )


def edge(up: FleetProcess) -> int:
    """Process id of the edge."""
    [pid] = up.pids(" edge ")
    return pid


def edge_bytes(up: FleetProcess) -> int:
    """Resident memory of the edge."""
    return int(Path(f"/proc/{edge(up)}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def refusal(client: raw_http.Connection, *statuses: int, within_s: float = 5.0) -> dict[str, Any]:
    """The error of a refusal, after which the connection is closed."""
    answer = await client.answer(within_s)
    assert answer.status in statuses, (answer.status, answer.body[:300])
    assert answer.headers["content-type"].startswith("application/json")
    return answer.error()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-large", "a" * (HEADER_BYTES_MAX - 1_000))], 200),
        ([("x-large", "a" * (HEADER_BYTES_MAX + 1_000))], 431),
        ([(f"x-{number}", "a") for number in range(HEADERS_MAX - 8)], 200),
        ([(f"x-{number}", "a") for number in range(HEADERS_MAX + 1)], 431),
        ([(f"x-{number}", "a" * 1_000) for number in range(70)], 431),
    ],
    ids=["one within", "one beyond", "many within", "many beyond", "many beyond in bytes"],
)
async def test_header_limits(up: FleetProcess, headers: list[tuple[str, str]], status: int) -> None:
    """64 KiB and 128 headers are taken, more is refused."""
    async with raw_http.connection(up.url) as client:
        await client.send(raw_http.request(encoded(SMALL), headers=headers))
        answer = await client.answer()
        assert answer.status == status, answer.body
        if status != 200:
            answer.error()


async def test_a_long_path_is_refused(up: FleetProcess) -> None:
    """The request line counts as header."""
    async with raw_http.connection(up.url) as client:
        await client.send(raw_http.request(encoded(SMALL), "/v1/" + "a" * 2 * HEADER_BYTES_MAX))
        await refusal(client, 400, 414, 431)


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


MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n",
    "unknown version": b"GET /v1/models HTTP/9.9\r\nhost: x\r\n\r\n",
    "unknown method": b"FLOW /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    "space in a name": b"GET /v1/models HTTP/1.1\r\nbad header: x\r\n\r\n",
    "control character": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-bad: a\0b\r\n\r\n",
    "no colon": b"GET /v1/models HTTP/1.1\r\nhost\r\n\r\n",
    "bytes in the path": b"GET /v1/\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    "negative length": raw_http.request(encoded(SMALL), length="-5"),
    "length in words": raw_http.request(encoded(SMALL), length="ten"),
    "signed length": raw_http.request(encoded(SMALL), length="+10"),
    "two lengths in one": raw_http.request(encoded(SMALL), length="10, 20"),
    "two lengths": raw_http.request(encoded(SMALL), headers=[("content-length", "3")]),
    "length beyond 64 bits": raw_http.request(encoded(SMALL), length="9" * 30),
    "length and chunks": raw_http.request(encoded(SMALL), headers=[("transfer-encoding", "chunked")]),
    "bad chunk size": raw_http.request(
        b"zz\r\n{}\r\n0\r\n\r\n", headers=[("transfer-encoding", "chunked")], length=""
    ),
    "bad chunk end": raw_http.request(
        b"2\r\n{}xx0\r\n\r\n", headers=[("transfer-encoding", "chunked")], length=""
    ),
    "chunk beyond 64 bits": raw_http.request(
        b"f" * 20 + b"\r\n{}", headers=[("transfer-encoding", "chunked")], length=""
    ),
    "unknown coding": raw_http.request(encoded(SMALL), headers=[("transfer-encoding", "gzip")], length=""),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_http_is_refused_in_openais_format(up: FleetProcess, data: bytes) -> None:
    """What can not be read as HTTP gets a status of its kind, an error object, and the end of the connection."""
    async with raw_http.connection(up.url) as client:
        await client.send(data)
        error = await refusal(client, 400, 413, 501, 505)
        assert error["type"] == "invalid_request_error"
        assert await client.closed(within_s=1) == b""
    await until_idle(up)


@pytest.mark.parametrize("zeros", [10, 5_000, 60_000])
async def test_leading_zeros_of_a_length(up: FleetProcess, zeros: int) -> None:
    """5,000 of them are a malformed request, not a failure of the edge."""
    body = encoded(SMALL)
    async with raw_http.connection(up.url) as client:
        await client.send(raw_http.request(body, length="0" * zeros + str(len(body))))
        answer = await client.answer()
        assert answer.status in ((200, 400) if zeros < 20 else (400, 431)), answer.body
        if answer.status != 200:
            answer.error()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_half_closes_is_answered(up: FleetProcess, stream: bool) -> None:
    """Closing the sending side says that no further request comes; the answer to this one does."""
    body = {**SMALL, "max_tokens": 60, "stream": stream}
    async with raw_http.connection(up.url) as client:
        await client.send(raw_http.request(encoded(body)))
        client.end_of_sending()
        answer = await client.answer()
    assert answer.status == 200, answer.body
    if stream:
        assert answer.body.rstrip().endswith(b"data: [DONE]")
    else:
        assert msgspec.json.decode(answer.body)["usage"]["completion_tokens"] == 60
    await until_idle(up)


async def test_pipelined_requests_are_answered_in_order(up: FleetProcess) -> None:
    """Three requests in one packet: three answers, each to its own."""
    tokens = (9, 2, 5)
    async with raw_http.connection(up.url) as client:
        await client.send(b"".join(raw_http.request(encoded(SMALL, max_tokens=count)) for count in tokens))
        for count in tokens:
            answer = await client.answer()
            assert answer.status == 200, answer.body
            assert msgspec.json.decode(answer.body)["usage"]["completion_tokens"] == count


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


Stage = Callable[[raw_http.Connection], Awaitable[None]]


async def _in_headers(client: raw_http.Connection) -> None:
    await client.send(raw_http.request(encoded(LONG))[:40])


async def _in_body(client: raw_http.Connection) -> None:
    await client.send(raw_http.request(encoded(LONG))[:-5])


async def _after_request(client: raw_http.Connection) -> None:
    await client.send(raw_http.request(encoded(LONG)))


async def _before_first_token(client: raw_http.Connection) -> None:
    await client.send(raw_http.request(encoded(LONG, stream=True, prompt="river " * 8_000)))


async def _mid_stream(client: raw_http.Connection) -> None:
    await client.send(raw_http.request(encoded(LONG, stream=True)))
    status, _ = await client.head()
    assert status == 200
    seen = 0
    async for chunk in client.chunks():
        seen += chunk.count(b"data: {")
        if seen >= 5:
            return


STAGES: dict[str, Stage] = {
    "headers": _in_headers,
    "body": _in_body,
    "whole answer": _after_request,
    "before the first token": _before_first_token,
    "stream": _mid_stream,
}


@pytest.mark.parametrize("how", ["closed", "reset"])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_leaves_nothing(up: FleetProcess, stage: str, how: str) -> None:
    """At whatever stage: soon no request is active, no stream open, and no worker computes for it."""
    clients = [await raw_http.connect(up.url) for _ in range(6)]
    await asyncio.gather(*(STAGES[stage](client) for client in clients))
    if stage == "whole answer":
        await up.until("they run", lambda stats: sum(one.get("running", 0) for one in stats) >= 1)
    for client in clients:
        client.reset() if how == "reset" else client.close()
    await until_idle(up)
    assert await ask(up.url) < SERVED_S


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


async def test_waiting_requests_of_clients_that_left_are_forgotten(tmp_path: Path) -> None:
    """A request that waits in the router's queue leaves it with its client, and never reaches a worker."""
    queue = ("--workers", "1", "--busy-kv", "0.00001", "--queue-tenant-share", "1")
    async with fleet(tmp_path, "--engine", "sim", *queue) as up:
        async with raw_http.connection(up.url) as first:
            await _mid_stream(first)
            for how in ("reset", "closed"):
                waiting = [await raw_http.connect(up.url) for _ in range(6)]
                for number, client in enumerate(waiting):
                    await client.send(raw_http.request(encoded(LONG, stream=number % 2 == 0)))
                await up.until(
                    "they wait",
                    lambda stats: any(one.get("active_requests", 0) >= 7 for one in stats),
                    within_s=10,
                )
                for client in waiting:
                    client.reset() if how == "reset" else client.close()
                await up.until(
                    "only the first is left",
                    lambda stats: (
                        sum(one.get("active_requests", 0) for one in stats) == 1
                        and sum(one.get("running", 0) + one.get("waiting", 0) for one in stats) == 1
                    ),
                    within_s=4,
                )
            first.reset()
        await until_idle(up)


async def test_connections_are_limited(tmp_path: Path) -> None:
    """Per address and in total: one more is refused at once, in OpenAI's format, and a closed one makes room."""
    limits = ("--connections-per-address-max", "8", "--connections-max", "20")
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
