"""Clients that leave, at whatever stage of their request: nobody works for them any more."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.faults.clients.requests import LONG, SERVED_S, ask, begin_stream, encoded, until_idle
from tests.support.clients import raw_http
from tests.support.marks import CLIENTS
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [*CLIENTS, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(120)]

Stage = Callable[[raw_http.Connection], Awaitable[None]]


async def _in_headers(client: raw_http.Connection) -> None:
    await client.send(raw_http.request(encoded(LONG))[:40])


async def _in_body(client: raw_http.Connection) -> None:
    await client.send(raw_http.request(encoded(LONG))[:-5])


async def _after_request(client: raw_http.Connection) -> None:
    await client.send(raw_http.request(encoded(LONG)))


async def _before_first_token(client: raw_http.Connection) -> None:
    await client.send(raw_http.request(encoded(LONG, stream=True, prompt="river " * 8_000)))


STAGES: dict[str, Stage] = {
    "headers": _in_headers,
    "body": _in_body,
    "whole answer": _after_request,
    "before the first token": _before_first_token,
    "stream": begin_stream,
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


async def test_waiting_requests_of_clients_that_left_are_forgotten(tmp_path: Path) -> None:
    """A request that waits in the router's queue leaves it with its client, and never reaches a worker."""
    queue = ("--workers", "1", "--busy", "kv=0.00001", "--queue", "tenant_share=1")
    async with fleet(tmp_path, "--engine", "sim", *queue) as up:
        async with raw_http.connection(up.url) as first:
            await begin_stream(first)
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
                    within_s=10,
                )
            first.reset()
        await until_idle(up)
