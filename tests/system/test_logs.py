"""The log lines of a fleet: one can follow a request over edge, router and workers, also when it moves to another worker."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.fleet import fleet, log_lines, stream_text

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
BODY: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Tell me a long story about a river. " * 10}],
    "max_tokens": 300,
    "ignore_eos": True,
}
STREAMS = 4

STORY = {
    ("edge", "request_accepted"),
    ("router", "route_decided"),
    ("edge", "leg_sent"),
    ("worker", "leg_accepted"),
    ("edge", "request_migrated"),
    ("worker", "leg_ended"),
    ("edge", "request_ended"),
}


async def test_a_migrated_request_can_be_followed_over_all_processes(tmp_path: Path) -> None:
    """By its id in those of each actor, and by its trace id; `fleet` sees that each line of each process is whole."""
    killed: list[int] = []
    async with fleet(tmp_path, "--engine", "sim", "--log-level", "debug") as up:
        async with up.client() as client:
            client.headers.update(HEADERS)

            def on_text(chunks: int) -> None:
                if chunks >= 20 and not killed:
                    killed.append(up.kill("--name worker-0"))

            await asyncio.gather(*(stream_text(client, BODY, on_text) for _ in range(STREAMS)))
        await up.until_whole()
    lines = log_lines(tmp_path / "up.log")
    ended = [line["request"] for line in lines if line["event"] == "request_ended"]
    assert len(ended) == STREAMS
    moved = {line["request"] for line in lines if line["event"] == "request_migrated"}
    assert moved <= {*ended}
    request = min(moved)
    story = [line for line in lines if line.get("request") == request]
    assert {(line["kind"], line["event"]) for line in story} >= STORY
    # One worker after the other.
    accepted = [line for line in story if line["event"] == "leg_accepted"]
    assert [line["worker"] for line in accepted] == ["worker-0", "worker-1"]
    assert accepted[0]["pid"] == killed[0] != accepted[1]["pid"]
    assert all(line["pool"] == "sim-b16" for line in story if line["kind"] in ("router", "worker"))
    assert all(line["log_position"] > 0 for line in story if line["event"] in ("route_decided", "leg_sent"))
    assert all(line["trace"] == TRACE for line in story)
    # What concerns an attempt names its request.
    assert all("request" in line for line in lines if "attempt" in line)
    assert {line["kind"] for line in lines} >= {"up", "edge", "router", "worker"}
    assert [line["child"] for line in lines if line["event"] == "child_restarting"] == ["worker-0"]
