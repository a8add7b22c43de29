"""The load generator's client, against bytes that servers send."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest

from headwater.ops.bench.client import Failure, LoadClient, StreamedAnswer, address_of
from headwater.ops.config.setting import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"


def chunk(text: str, role: str = "") -> bytes:
    return event(f'{{"choices":[{{"index":0,"delta":{{"role":"assistant","content":"{text}"}}}}]}}')


USAGE = event(
    '{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}'
)
DONE = event("[DONE]")


def sent(*pieces: bytes) -> list[bytes]:
    """A whole chunked response."""
    return [HEAD, *(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n"]


@asynccontextmanager
async def answering(*responses: Sequence[bytes] | None) -> AsyncIterator[tuple[LoadClient, list[int]]]:
    """A server that answers its requests in turn, each piece in a packet of its own; None closes the connection instead.

    Yields a client for it, and the number of the connection of each request.
    """
    left = iter(responses)
    used: list[int] = []
    connections = iter(range(100))
    handlers: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(cast("asyncio.Task[None]", asyncio.current_task()))
        number = next(connections)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                used.append(number)
                response = next(left)
                for piece in response or ():
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                if response is None or b"0\r\n\r\n" not in response[-1]:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = LoadClient(address_of(f"http://127.0.0.1:{port}/v1", "test"), timeout_s=20)
    try:
        yield client, used
    finally:
        client.close()
        server.close()
        await asyncio.gather(*handlers)


async def post(client: LoadClient) -> StreamedAnswer:
    return await client.post("/v1/chat/completions", b"{}")


async def test_tokens_are_those_of_usage_and_times_those_of_text() -> None:
    """A chunk that opens the stream is no token; events may be split anywhere."""
    whole = chunk("") + chunk("one") + chunk(" two") + USAGE + DONE
    async with answering(sent(whole), sent(*(whole[at : at + 7] for at in range(0, len(whole), 7)))) as (
        client,
        _,
    ):
        for _ in range(2):
            answer = await post(client)
            assert answer.failure is None
            assert answer.text == "one two"
            assert len(answer.came_s) == 2
            assert answer.usage is not None
            assert (
                answer.usage.prompt_tokens,
                answer.usage.completion_tokens,
                answer.usage.cached_tokens,
            ) == (7, 5, 4)
            assert answer.began_s < answer.came_s[0] <= answer.came_s[1]


async def test_reasoning_and_calls_are_tokens_too() -> None:
    reasoning = event('{"choices":[{"delta":{"reasoning_content":"so"}}]}')
    call = event('{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}')
    async with answering(sent(reasoning, call, DONE)) as (client, _):
        answer = await post(client)
    assert (len(answer.came_s), answer.text, answer.usage) == (2, "", None)


async def test_a_token_without_text_has_a_time() -> None:
    """As half a character has; what only opens or ends the stream has none."""
    half = event('{"choices":[{"delta":{"content":""}}]}')
    end = event('{"choices":[{"delta":{"content":""},"finish_reason":"length"}]}')
    async with answering(sent(chunk(""), half, chunk("x"), half, end, DONE)) as (client, _):
        answer = await post(client)
    assert (len(answer.came_s), answer.pieces) == (3, 1)


async def test_an_answer_of_empty_texts_has_times() -> None:
    """Tokens that are no text, as special ones."""
    async with answering(sent(chunk(""), chunk(""), DONE)) as (client, _):
        answer = await post(client)
    assert (answer.failure, len(answer.came_s)) == (None, 2)


@pytest.mark.parametrize(
    ("response", "cause", "message"),
    [
        ([HEAD, b"%x\r\n%b\r\n" % (len(chunk("a")), chunk("a"))], "truncated stream", ""),
        (sent(chunk("a")), "truncated stream", "before [DONE]"),
        (sent(event('{"error":{"message":"out of blocks"}}'), DONE), "error in the stream", "out of blocks"),
        (sent(event("{nonsense"), DONE), "unreadable event", "nonsense"),
        (sent(DONE), "no token", "no token"),
        (None, "connection lost", "closed"),
        ([b"SSH-2.0-x\r\n"], "no HTTP", ""),
        (
            [
                b'HTTP/1.1 429 Too Many\r\ncontent-length: 32\r\n\r\n{"error": {"message": "slower!"}}0\r\n\r\n'[
                    :-5
                ]
            ],
            "HTTP 429",
            "slower!",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_failure_has_its_cause(response: list[bytes] | None, cause: str, message: str) -> None:
    async with answering(response) as (client, _):
        failure = (await post(client)).failure
    assert failure is not None
    assert failure.cause == cause
    assert message in failure.message


async def test_a_connection_is_used_again_and_replaced_once_it_is_closed() -> None:
    """A server that closes an idle connection costs no request."""
    async with answering(sent(chunk("a"), DONE), sent(chunk("b"), DONE), None, sent(chunk("c"), DONE)) as (
        client,
        used,
    ):
        assert [(await post(client)).text for _ in range(3)] == ["a", "b", "c"]
        # The third was on the first connection, which was closed without an answer.
        assert used == [0, 0, 0, 1]


async def test_a_request_without_an_answer_times_out() -> None:
    release = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = LoadClient(
        address_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "test"), timeout_s=0.05
    )
    answer = await post(client)
    assert answer.failure == Failure("timeout", "not answered within 0.05 s")
    release.set()
    server.close()
    await asyncio.sleep(0.01)


async def test_a_server_that_is_gone_is_a_failure() -> None:
    answer = await post(LoadClient(address_of("http://127.0.0.1:9", "test")))
    assert answer.failure is not None
    assert answer.failure.cause == "no connection"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a:b"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="write it as http://HOST:PORT"):
        address_of(url, "URL")


def test_the_parts_of_an_address() -> None:
    assert address_of("http://h:80/x/v1/", "URL") == ("h", 80, False, "/x")
    assert address_of("https://h", "URL") == ("h", 443, True, "")
