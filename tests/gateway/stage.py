"""Envoy in front of two edges, each with a worker beside it, as `examples/gateway/envoy.yaml` has it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import msgspec
import yaml
from nats.js.errors import NotFoundError

from headwater.ops.start.sockets import free_port
from headwater.schemas import subjects
from headwater.schemas.control import WeightsReply, WeightsRequest
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.processes.restarted import (
    KeptProcess,
    kept_edge,
    kept_picker,
    kept_worker,
    until_healthy,
    until_ready,
)
from tests.support.processes.tools import running

ROOT: Final = Path(__file__).parents[2]
CONFIGURATION: Final = ROOT / "examples" / "gateway" / "envoy.yaml"
ENVOY: Final = ROOT / ".proxies" / "envoy" / "_bin" / "envoy"

SUBSET_HEADER: Final = "x-test-subset"
"""Of this header Envoy makes the metadata that the protocol has for a subset, as a gateway would from its own sources."""

Change = Callable[[dict[str, Any]], None]


class Envoy(NamedTuple):
    """A running one. `url` is for clients."""

    process: asyncio.subprocess.Process
    url: str
    log: Path

    def client(self, **headers: str) -> httpx.AsyncClient:
        """An HTTP client of it."""
        return httpx.AsyncClient(base_url=self.url, timeout=60, headers=headers)


class Stage(NamedTuple):
    """A fleet with `worker-0` beside the edge of `up`, and `w-b` beside `edge-b`; its pickers, and Envoy."""

    up: FleetProcess
    edge: KeptProcess
    worker: KeptProcess
    pickers: Sequence[KeptProcess]
    ports: tuple[int, ...]
    envoy: Envoy
    endpoints: tuple[str, str]
    folder: Path

    @property
    def edge_ports(self) -> tuple[int, int]:
        """The ports of the two edges."""
        first, second = (int(endpoint.rpartition(":")[2]) for endpoint in self.endpoints)
        return first, second

    async def decisions(self) -> int:
        """Decisions that the router has made."""
        found = await self.up.until("the router answers", lambda stats: any("decisions" in s for s in stats))
        return sum(int(one.get("decisions", 0)) for one in found)

    async def counted(self) -> int:
        """Requests that the router counts at workers."""
        client = await self.up.connected()
        subject = subjects.engine_weights("default", "sim-b16")
        reply = await client.request(subject, msgspec.msgpack.encode(WeightsRequest()), timeout=5)
        return sum(one.requests for one in msgspec.msgpack.decode(reply.data, type=WeightsReply).engines)

    async def idle(self) -> None:
        """Wait until no worker runs anything, and no edge streams."""

        def holds(stats: list[dict[str, Any]]) -> bool:
            busy = sum(one.get("running", 0) + one.get("waiting", 0) for one in stats)
            return not busy and not sum(one.get("active_requests", 0) for one in stats)

        await self.up.until("nothing runs", holds, within_s=20)

    async def served_by(self, request: str) -> str:
        """The edge that has written of this request last."""
        jetstream = (await self.up.connected()).jetstream()
        stream = subjects.request_stream("default")
        async with asyncio.timeout(20):
            while True:
                for edge in ("edge-0", self.edge.name):
                    subject = subjects.request_subject("default", edge)
                    # An edge that has had no request has no message.
                    with contextlib.suppress(NotFoundError):
                        newest = await jetstream.get_last_msg(stream, subject)
                        if request.encode() in (newest.data or b""):
                            return edge
                await asyncio.sleep(0.02)


def bootstrap(
    listen: int, admin: int, edges: Sequence[int], pickers: Sequence[int], change: Change | None = None
) -> bytes:
    """The configuration of the example with other ports, and where a client's header names the subset."""
    document = yaml.safe_load(CONFIGURATION.read_text())
    static = document["static_resources"]
    document["admin"]["address"]["socket_address"]["port_value"] = admin
    static["listeners"][0]["address"]["socket_address"]["port_value"] = listen
    for cluster, ports in zip(static["clusters"], (edges, pickers), strict=True):
        group = cluster["load_assignment"]["endpoints"][0]
        members = group["lb_endpoints"] = group["lb_endpoints"][: len(ports)]
        for member, port in zip(members, ports, strict=True):
            member["endpoint"]["address"]["socket_address"]["port_value"] = port
    manager = static["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    kind = "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"
    rule = {
        "header": SUBSET_HEADER,
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
        },
        "remove": True,
    }
    subset = {
        "name": "envoy.filters.http.header_to_metadata",
        "typed_config": {"@type": kind, "request_rules": [rule]},
    }
    manager["http_filters"].insert(0, subset)
    if change is not None:
        change(manager["http_filters"][1]["typed_config"])
    return msgspec.json.encode(document)


@asynccontextmanager
async def envoy(
    folder: Path, edges: Sequence[int], pickers: Sequence[int], change: Change | None = None
) -> AsyncIterator[Envoy]:
    """Envoy as the example configures it; `change` gets the settings of its external processing."""
    listen, admin = free_port(0), free_port(0)
    file = folder / f"envoy-{listen}.json"
    file.write_bytes(bootstrap(listen, admin, edges, pickers, change))
    log = folder / f"envoy-{listen}.log"
    line = (str(ENVOY), "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id")
    async with running(log, *line, "--log-level", "warning") as process:
        async with httpx.AsyncClient() as client, asyncio.timeout(20):
            while True:
                assert process.returncode is None, log.read_text()
                try:
                    clusters = (await client.get(f"http://127.0.0.1:{admin}/clusters")).text
                except httpx.TransportError:
                    clusters = ""
                # A picker that is not there fails its check.
                checked = clusters.count("pickers::127.0.0.1:") and "failed_active_hc" not in clusters
                if checked or (clusters and change is not None):
                    break
                await asyncio.sleep(0.02)
        yield Envoy(process, f"http://127.0.0.1:{listen}", log)


@asynccontextmanager
async def stage(
    folder: Path, *flags: str, pickers: int = 2, access: tuple[str, ...] = (), auth: tuple[str, ...] = ()
) -> AsyncIterator[Stage]:
    """The whole of it; `flags` are for the fleet, `auth` for what authenticates clients, `access` for all that log in."""
    first, second = free_port(0), free_port(0)
    endpoints = f"127.0.0.1:{first}", f"127.0.0.1:{second}"
    ports = tuple(free_port(0) for _ in range(pickers))
    own = ("--engine", "sim", "--workers", "1")
    beside = ("--port", str(first), "--endpoint", endpoints[0])
    async with fleet(folder, *own, *beside, *flags, *auth, access=access) as up, AsyncExitStack() as stack:
        started = []
        for number, port in enumerate(ports):
            picker = kept_picker(
                folder, up.nats, f"picker-{number}", "--picker-port", str(port), *auth, *access
            )
            started.append(await stack.enter_async_context(picker))
        worker = await stack.enter_async_context(
            kept_worker(folder, up.nats, "w-b", "--workers", "1", "--endpoint", endpoints[1], *access)
        )
        edge, _ = await stack.enter_async_context(
            kept_edge(folder, up.nats, "edge-b", "--port", str(second), *auth, *access)
        )
        for endpoint in endpoints:
            await until_healthy(f"http://{endpoint}", workers=2)
        if not access:
            # Where rights are limited, tests may not ask the actors.
            await until_ready(up.nats, {"picker": pickers})
            await up.until("the router has both", lambda s: any(one.get("workers") == 2 for one in s))
        made = await stack.enter_async_context(envoy(folder, (first, second), ports))
        yield Stage(up, edge, worker, started, ports, made, endpoints, folder)


def kill(process: KeptProcess) -> None:
    """SIGKILL, after which it is not started again until `resume`."""
    process.hold()
    os.kill(process.pid, signal.SIGKILL)
