"""Probes of a process: answered by a thread of their own, from a copy of the event loop's state that may not be too old."""

import asyncio
import http.client
import json
import socket
import threading
from typing import Any

import pytest

from headwater.ops.config.processes import MetricsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.start import metrics
from headwater.ops.start.metrics import HEALTH_STALE_S, ProbeBoard
from headwater.ops.start.sockets import free_port

LIVE_S = 15.0


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Time:
    """Time that stands still."""
    return Time()


@pytest.fixture
def board(clock: Time) -> ProbeBoard:
    """Of a process that has just started."""
    return ProbeBoard(LIVE_S, clock)


def ready() -> tuple[bool, dict[str, Any]]:
    """An actor that serves."""
    return True, {"status": "ok", "workers": {"m": 2}}


def draining() -> tuple[bool, dict[str, Any]]:
    """An actor that ends."""
    return False, {"status": "draining"}


def test_a_process_that_starts_lives_but_does_not_serve(board: ProbeBoard) -> None:
    """Nobody should restart it, and nobody should send requests."""
    assert board.live()[0] == 200
    assert board.health()[0] == 503
    assert b"starting" in board.health()[1]


def test_health_is_what_the_actor_says(board: ProbeBoard) -> None:
    """Between two incarnations of the actor nothing is served."""
    board.beat(ready)
    assert board.health() == (200, b'{"status":"ok","workers":{"m":2}}')
    board.beat(draining)
    assert board.health() == (503, b'{"status":"draining"}')
    assert board.live()[0] == 200
    board.beat(None)
    assert board.health() == (503, b'{"status":"restarting"}')


def test_an_event_loop_that_does_not_run_is_noticed(board: ProbeBoard, clock: Time) -> None:
    """First no requests are sent, then the process is restarted; it recovers with the next turn."""
    board.beat(ready)
    clock.now_s += HEALTH_STALE_S + 0.1
    assert board.health()[0] == 503
    assert b"event loop does not run" in board.health()[1]
    assert board.live()[0] == 200
    clock.now_s += LIVE_S
    assert board.live()[0] == 503
    board.beat(ready)
    assert (board.live()[0], board.health()[0]) == (200, 200)


def get(port: int, path: str) -> tuple[int, bytes]:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.fixture
def port() -> int:
    """A free port, which no other process finds."""
    return free_port(0)


async def test_a_blocked_event_loop_delays_no_probe(port: int) -> None:
    """The thread answers while the loop does not turn: live at first, then no longer."""
    now_s = [0.0]
    board = ProbeBoard(0.5, lambda: now_s[0])
    assert metrics.serve(MetricsSettings(port=port), board=board) == port
    beating = asyncio.create_task(board.keep_beating(lambda: ready))
    await asyncio.sleep(0)
    statuses: list[int] = []

    def probe() -> None:
        for now_s[0] in (0.0, 0.4, 0.6, 100.0):
            statuses.append(get(port, "/live")[0])

    # The loop does not turn until all have been answered.
    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    assert statuses == [200, 200, 503, 503]
    async with asyncio.timeout(10):
        while get(port, "/live")[0] != 200:
            await asyncio.sleep(0.05)
    status, body = get(port, "/health")
    assert status == 200
    assert json.loads(body)["workers"] == {"m": 2}
    assert b"process_open_fds" in get(port, "/metrics")[1]
    beating.cancel()


def test_a_connection_that_sends_nothing_delays_no_probe(port: int) -> None:
    """Each has a thread."""
    metrics.serve(MetricsSettings(port=port), board=ProbeBoard(1.0))
    with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
        assert get(port, "/live")[0] == 200


def test_a_taken_port_is_an_error_that_names_the_flag() -> None:
    """As of every other port."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="--metrics-port"):
        metrics.serve(MetricsSettings(port=taken.getsockname()[1]))
