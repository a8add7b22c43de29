"""Every query of every board and every alert rule has an answer, from a real Prometheus that scraped a real fleet under load and faults."""

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from headwater.actors import metrics
from headwater.ops.start.sockets import free_range
from tests.support.processes.commands import ended, kill_all, spawn
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.servers.prometheus import Prometheus, board_queries, prometheus, until

pytestmark = [pytest.mark.processes]

FLAGS = (
    *("--engine", "sim", "--workers", "1", "--prefill-workers", "1", "--decode-workers", "2"),
    *("--metrics-tenants", "2", "--limit", "concurrent_requests=7", "--busy", "prefill_tokens=500"),
)
SENT_AT_ONCE = 32

HAPPENED = {
    # What the faults were for.
    "a worker died under its requests": 'sum(headwater_edge_setbacks_total{cause="lost"})',
    "requests moved": "sum(headwater_edge_migrations_total)",
    "its lease lapsed, or a new life began": "sum(changes(headwater_worker_epoch[5m]))",
    "prompts were handed off": 'sum(headwater_engine_request_seconds_count{role="prefill"})',
    "decode workers took them": 'sum(headwater_engine_generated_tokens_total{role="decode"})',
    "a rate limit was reached": 'sum(headwater_edge_rate_limited_total{limit="concurrency"})',
    "requests waited for a worker": "sum(headwater_router_queue_seconds_count)",
    "some prompts were cached, as predicted": "sum(headwater_router_predicted_cached_tokens_total)",
    "and as found": "sum(headwater_edge_cached_prompt_tokens_total)",
    "a shadow found the choices of another policy worse": 'sum(headwater_shadow_regret_total{of="shadow"})',
    "further tenants count together": 'sum(headwater_edge_tenant_requests_total{tenant="other"})',
}
ELSEWHERE = re.compile(
    "headwater_(edge_(media|encode|video|stored|stripped)|worker_(media|images|embedding)|router_(engine_weight|traffic_share|unknown_events)|tracer|picker)"
)
"""Metrics of media, videos, stored responses, engine weights, traces and picks, which this fleet has none of."""


def conditions(folder: Path) -> dict[str, str]:
    """The expression of each alert with comparisons that answer 0 where they do not hold, where they would answer nothing."""
    groups = yaml.safe_load((folder / "alerts.yaml").read_text())["groups"]
    rules = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    return {name: re.sub(r" (==|!=|>=|<=|>|<) ", r" \1 bool ", expr) for name, expr in rules.items()}


@asynccontextmanager
async def traffic(up: FleetProcess) -> AsyncIterator[None]:
    """Requests of four tenants, some of them for a model that is not there, until the end of the block."""
    drawn = random.Random(7)

    async def send(client: httpx.AsyncClient, number: int) -> None:
        prompt = f"{number % 8 if number % 3 else number} Where does a river begin? " * drawn.choice(
            (20, 200)
        )
        body: dict[str, Any] = {"model": "sim", "prompt": prompt, "max_tokens": drawn.choice((4, 200))}
        if number % 25 == 0:
            body["model"] = "none"
        tenant = {"x-headwater-tenant": drawn.choice(("alder", "birch", "cedar", "elm"))}
        with contextlib.suppress(httpx.TransportError):
            answer = await client.post("/v1/completions", json=body, headers=tenant)
            assert answer.status_code in (200, 404, 429, 503), answer.text
            if answer.status_code != 200:
                await asyncio.sleep(0.1)

    async def client_of(first: int) -> None:
        async with up.client() as client:
            number = first
            while True:
                await send(client, number)
                number += SENT_AT_ONCE

    clients = asyncio.gather(*(client_of(first) for first in range(SENT_AT_ONCE)))
    try:
        yield
    finally:
        failed = clients.done()
        clients.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await clients
        assert not failed


@asynccontextmanager
async def shadow(up: FleetProcess) -> AsyncIterator[str]:
    """A shadow of the fleet's router; yields where its metrics are."""
    port = str(free_range(1, "127.0.0.1"))
    process = await spawn("shadow", "--policy", "round_robin", "--nats", up.nats, "--metrics-port", port)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await kill_all(process)


async def unmoved(server: Prometheus) -> list[str]:
    """What did not happen yet."""
    answers = await asyncio.gather(*(server.query(expr) for expr in HAPPENED.values()))
    return [what for what, answer in zip(HAPPENED, answers, strict=True) if not any(answer.values())]


async def killed_until_moved(up: FleetProcess, server: Prometheus) -> list[str]:
    """Kill a worker until one died under requests: between two of them it has none. Returns what did not happen all the same."""
    left = list(HAPPENED)
    for second in range(60):
        if not second % 15:
            await up.kill_worker("decode-0")
        await asyncio.sleep(1)
        left = await unmoved(server)
        if not left:
            break
    return left


async def test_every_query_has_an_answer(tmp_path: Path) -> None:
    async with fleet(tmp_path, *FLAGS) as up, shadow(up) as target:
        out = tmp_path / "monitoring"
        made = await ended(
            *("monitoring", "--out", str(out), "--data-dir", str(tmp_path / "data"), "--scrape-s", "1"),
            *("--target", target),
        )
        assert made.code == 0, made.output
        queries = board_queries(out)
        assert len(queries) > 60
        async with prometheus(tmp_path, out / "prometheus.yml") as server, traffic(up):
            seen = "count(headwater_worker_epoch) == 4 and sum(headwater_edge_active_requests) > 0"
            await until(lambda: server.query(seen), bool)
            assert not await killed_until_moved(up, server)
            await until(lambda: server.unanswered(queries), lambda left: not left)
            await until(lambda: server.unanswered(list(conditions(out).values())), lambda left: not left)
            rules = await until(
                server.rules, lambda found: all(rule["health"] != "unknown" for rule in found)
            )
            names = await server.names()
    assert {rule["name"] for rule in rules} == set(conditions(out))
    assert not [rule for rule in rules if rule["health"] != "ok"]
    _check_names(names)


def _check_names(names: set[str]) -> None:
    """Every series is in the table, and every metric of the table that this fleet can have is a series."""
    suffixes = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("",), "gauge": ("",)}
    table = {row.name: {row.name + suffix for suffix in suffixes[row.kind]} for row in metrics.table()}
    own = {name for name in names if name.startswith("headwater_") and not name.endswith("_created")}
    assert own <= set().union(*table.values())
    assert {
        name for name, series in table.items() if not series <= own and not ELSEWHERE.match(name)
    } == set()
