"""Requests that are not HTTP, or at the edge of it: a status of their kind, and nothing is left of them."""

import msgspec
import pytest

from tests.faults.clients.requests import SMALL, encoded, refusal, until_idle
from tests.support.clients import raw_http
from tests.support.marks import CLIENTS
from tests.support.processes.fleet import FleetProcess

pytestmark = [*CLIENTS, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(120)]

HEADER_BYTES_MAX = 64 * 1024
HEADERS_MAX = 128


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
