"""A real Prometheus that scrapes a fleet and evaluates its alert rules."""

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from headwater.ops.start.sockets import free_range

WITHIN_S = 60.0
PAUSE_S = 0.1

T = TypeVar("T")


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`. Fails where it is not installed."""
    found = shutil.which(name)
    assert found, f"these tests need {name}: apt-get install --no-install-recommends prometheus"
    return found


class Prometheus:
    """A running server; `client` speaks to its HTTP API."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def query(self, expr: str) -> dict[str, float]:
        """The present value of each series of an expression, by its labels; those that are no number are left out."""
        found = await self._get("query", query=expr)
        values = {str(one["metric"]): float(one["value"][1]) for one in found["result"]}
        return {labels: value for labels, value in values.items() if value == value}

    async def unanswered(self, exprs: Sequence[str]) -> list[str]:
        """Those of the expressions that have no answer that is a number."""
        answers = await asyncio.gather(*(self.query(expr) for expr in exprs))
        return [expr for expr, answer in zip(exprs, answers, strict=True) if not answer]

    async def names(self) -> set[str]:
        """Names of all series."""
        return set(await self._get("label/__name__/values"))

    async def rules(self) -> list[dict[str, Any]]:
        """The alert rules with their health."""
        groups = (await self._get("rules", type="alert"))["groups"]
        return [rule for group in groups for rule in group["rules"]]

    async def _get(self, path: str, **parameters: str) -> Any:
        answer = await self._client.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]


def board_queries(folder: Path, boards: str = "*") -> list[str]:
    """The expressions of the boards that `headwater monitoring` wrote into a folder, or of those whose names match."""
    return [
        target["expr"].replace("$__rate_interval", "15s")
        for path in sorted(folder.glob(f"boards/{boards}.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]


async def until(what: Callable[[], Awaitable[T]], holds: Callable[[T], bool]) -> T:
    """Ask again until the answer satisfies `holds`; returns it. Fails with the last one."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        found = await what()
        if holds(found):
            return found
        assert time.monotonic() < deadline, found
        await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def prometheus(folder: Path, config: Path) -> AsyncIterator[Prometheus]:
    """A server with this configuration, its data in `folder`, ready."""
    address = f"127.0.0.1:{free_range(1, '127.0.0.1')}"
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program("prometheus"),
            *(f"--config.file={config}", f"--storage.tsdb.path={folder / 'series'}"),
            f"--web.listen-address={address}",
            stdout=log,
            stderr=log,
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as client:

            async def ready() -> int:
                assert process.returncode is None, (folder / "prometheus.log").read_text()[-2000:]
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get("/-/ready")).status_code
                return 0

            await until(ready, lambda status: status == 200)
            yield Prometheus(client)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
