"""The metrics port: probes, answered by a thread from a copy of the event loop's state, and common names of engines' metrics."""

import asyncio
import http.client
import json
import socket
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from headwater.engines import registry, traits
from headwater.ops.config.processes import MetricsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.start import metrics
from headwater.ops.start.metrics import (
    HEALTH_STALE_S,
    ProbeBoard,
    common_families,
    common_names,
    zero_counters,
)
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


TABLES = {name: traits.metrics for name, traits in registry.all_traits().items() if traits.metrics}
COMMON = {one.name for one in traits.COMMON_METRICS}


@pytest.mark.parametrize("engine", TABLES)
def test_a_table_names_each_common_metric_once(engine: str) -> None:
    names = list(TABLES[engine].values())
    assert len(names) == len(set(names))
    # TensorRT-LLM counts no preemptions.
    assert COMMON - set(names) == ({"preemptions"} if engine == "tensorrt_llm" else set())


def test_the_tables_are_of_the_engines_that_generate() -> None:
    assert set(TABLES) == {"sim", "vllm", "sglang", "tensorrt_llm"}
    assert len(common_names()) == sum(len(table) for table in TABLES.values()), "two engines share a name"


def test_vllm_has_the_metrics_of_its_table() -> None:
    """The release that is installed, in its source: its metrics need an engine."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    assert not {name for name in TABLES["vllm"] if f'name="{name}"' not in source}


def test_labels_of_the_engine_are_added_up() -> None:
    """Of a worker, by rank: an engine's own labels differ from engine to engine, and a reason is not everybody's."""
    own = CollectorRegistry()
    labels = ("worker", "pool", "role", "rank", "model_name", "finished_reason")
    tokens = Counter("trtllm_prompt_tokens", "own help", labels, registry=own)
    tokens.labels("w", "p", "both", "0", "m", "stop").inc(3)
    tokens.labels("w", "p", "both", "0", "m", "length").inc(4)
    tokens.labels("w", "p", "both", "1", "m", "stop").inc(5)
    waits = Histogram("sim_queue_seconds", "own help", labels, registry=own, buckets=(1, 2))
    waits.labels("w", "p", "both", "0", "m", "stop").observe(1.5)
    waits.labels("w", "p", "both", "0", "m", "length").observe(0.5)
    found = {family.name: family for family in common_families(own.collect(), common_names())}
    prompt = found["headwater_engine_prompt_tokens"]
    assert prompt.type == "counter"
    assert prompt.documentation == "Prompt tokens of requests, by the engine's own count"
    worker = {"worker": "w", "pool": "p", "role": "both"}
    assert [(one.name, one.labels, one.value) for one in prompt.samples] == [
        ("headwater_engine_prompt_tokens_total", worker | {"rank": "0"}, 7.0),
        ("headwater_engine_prompt_tokens_total", worker | {"rank": "1"}, 5.0),
    ]
    buckets = {
        one.labels["le"]: one.value
        for one in found["headwater_engine_queue_seconds"].samples
        if one.name == "headwater_engine_queue_seconds_bucket"
    }
    assert buckets == {"1.0": 1.0, "2.0": 2.0, "+Inf": 2.0}


def test_what_an_engine_has_not_counted_yet_is_zero() -> None:
    """With the labels of its process, and only what the engine counts at all."""
    labels = {"worker": "w", "pool": "p", "role": "both", "rank": "0", "host": "not kept"}

    def zeros(found: set[str]) -> dict[str, float]:
        families = list(zero_counters(found, labels))
        assert all(set(one.samples[0].labels) == {"worker", "pool", "role", "rank"} for one in families)
        return {one.samples[0].name: one.samples[0].value for one in families}

    assert zeros({"sglang:prompt_tokens", "sglang:generation_tokens"}) == {
        "headwater_engine_cached_prompt_tokens_total": 0.0,
        "headwater_engine_preemptions_total": 0.0,
    }
    assert "headwater_engine_preemptions_total" not in zeros({"trtllm_prompt_tokens"})
    assert zeros(set()) == {}
