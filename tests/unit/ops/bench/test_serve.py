"""The whole command against servers that know less of OpenAI's API."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from headwater.ops.bench.options import Arrivals, Output, Target, Traffic
from headwater.ops.bench.serve import serve
from headwater.ops.config.setting import ConfigError

Answer = tuple[int, list[dict[str, Any]]]


@asynccontextmanager
async def server(answer: Callable[[dict[str, Any]], Answer]) -> AsyncIterator[str]:
    """A server whose answers are a status and the events of a stream. Yields its URL."""

    handlers: list[asyncio.Task[None]] = []

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(cast("asyncio.Task[None]", asyncio.current_task()))
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                body = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                if head.startswith(b"get"):
                    status, text = 200, json.dumps({"data": [{"id": "old"}]})
                else:
                    status, events = answer(json.loads(body))
                    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
                    text = "".join([*lines, "data: [DONE]\n\n"]) if status == 200 else json.dumps(events[0])
                writer.write(
                    f"HTTP/1.1 {status} X\r\ncontent-length: {len(text.encode())}\r\n\r\n{text}".encode()
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    started = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{started.sockets[0].getsockname()[1]}"
    finally:
        started.close()
        await asyncio.gather(*handlers)


def pieces(count: int) -> list[dict[str, Any]]:
    return [{"choices": [{"delta": {"content": "x"}}]} for _ in range(count)]


async def measured(url: str, folder: Path, target: Target) -> tuple[int, dict[str, Any]]:
    file = folder / "result.json"
    traffic = Traffic(requests=4)._replace(seed=1)
    code = await serve(url, traffic, Arrivals(concurrency=(2,)), target, Output(json_file=str(file)))
    found: dict[str, Any] = json.loads(file.read_bytes())
    return code, found


async def test_tokens_of_a_server_without_usage_are_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that refuses `stream_options` is asked without."""
    seen: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> Answer:
        seen.append(body)
        if "stream_options" in body:
            return 400, [{"error": {"message": "unknown field stream_options"}}]
        return 200, pieces(min(7, body["max_tokens"]))

    async with server(answer) as url:
        code, found = await measured(url, tmp_path, Target())
    point = found["points"][0]
    assert (code, point["failed"], point["tokens_counted"], point["output_tokens"]) == (0, 0, "pieces", 28)
    assert found["calibration"] == {"per_word": 1.0, "fixed": 0.0, "known": False}
    assert len(seen[-1]["messages"][0]["content"].split()) == 1_000
    assert "the server does not count tokens" in capsys.readouterr().out


async def test_a_server_that_refuses_ignore_eos_is_told_how_to_measure(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        if "ignore_eos" in body:
            return 400, [{"error": {"message": "unknown field ignore_eos"}}]
        usage = {"prompt_tokens": len(body["messages"][0]["content"].split()) * 2 + 5, "completion_tokens": 3}
        return 200, [*pieces(2), {"choices": [], "usage": usage}]

    async with server(answer) as url:
        with pytest.raises(ConfigError, match="--no-ignore-eos"):
            await measured(url, tmp_path, Target())
        code, found = await measured(url, tmp_path, Target(ignore_eos=False))
    assert (code, found["points"][0]["short_answers"]) == (0, 4)
    assert found["calibration"] == {"per_word": 2.0, "fixed": 5.0, "known": True}
    assert found["points"][0]["prompt_tokens"] == pytest.approx(4_000, abs=8)


async def test_a_sweep_in_which_all_fail_is_drawn_too(tmp_path: Path) -> None:
    """The picture has a title and no panels; one of answers of one token has none of times between tokens."""
    plot = tmp_path / "plot.svg"
    for fails, titles in ((True, []), (False, ["Output tokens per second", "Time to first token"])):
        seen: list[int] = []

        def answer(body: dict[str, Any], fails: bool = fails, seen: list[int] = seen) -> Answer:
            seen.append(1)
            return (503, [{"error": {"message": "full"}}]) if fails and len(seen) > 2 else (200, pieces(1))

        async with server(answer) as url:
            code = await serve(
                url, Traffic(requests=3), Arrivals(concurrency=(1, 2)), Target(), Output(plot=str(plot))
            )
        assert code == int(fails)
        texts = [node.text for node in ElementTree.fromstring(plot.read_text()).iter() if node.text]
        assert [text for text in texts if text.startswith(("Output", "Time"))] == titles


async def test_a_failed_request_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = 0

    def answer(body: dict[str, Any]) -> Answer:
        nonlocal count
        count += 1
        return (503, [{"error": {"message": "full"}}]) if count == 4 else (200, pieces(2))

    async with server(answer) as url:
        code, found = await measured(url, tmp_path, Target())
    assert (code, found["points"][0]["failures"]) == (1, {"HTTP 503": 1})
    assert "failed: 1 x HTTP 503: full" in capsys.readouterr().out
