"""The client side of control for `headwater ctl`, the admin port and the console: commands to a worker, and the engine weights and traffic splits of a pool."""

import asyncio
from typing import Any

import msgspec

from headwater.actors.bus import BusError, NoResponder
from headwater.actors.runtime.persistence import Ports
from headwater.actors.runtime.tables import LeaseTable
from headwater.actors.worker.control import ANSWER_S
from headwater.schemas import subjects
from headwater.schemas.events.splits import SplitReply, SplitRequest
from headwater.schemas.messages.control import (
    ControlReply,
    ControlRequest,
    WeightsReply,
    WeightsRequest,
)
from headwater.schemas.tables import Lease

REPLY_S = ANSWER_S + 10.0
STATUS_S = 3.0
POLL_S = 0.5
WEIGHTS_S = 10.0
"""Longer than a router waits for its log."""

_encode = msgspec.msgpack.Encoder().encode
_reply = msgspec.msgpack.Decoder(ControlReply)
_weights_reply = msgspec.msgpack.Decoder(WeightsReply)
_split_reply = msgspec.msgpack.Decoder(SplitReply)


async def send_command(
    ports: Ports, worker: str, request: ControlRequest, *, within_s: float = 900.0
) -> ControlReply:
    """Send a command to a worker and wait until it is executed, at most `within_s` seconds (then 504).

    404: no worker of that name answers. Raises `InvalidName`.
    """
    clock = ports.clock
    deadline = clock.monotonic_s() + within_s
    reply = await _request(ports, worker, request, min(REPLY_S, within_s))
    if reply.status != 202:
        return reply
    ticket = reply.data.get("ticket", "")
    while clock.monotonic_s() < deadline:
        await clock.sleep(POLL_S)
        status = await _request(ports, worker, ControlRequest("status", by=request.by), STATUS_S)
        if status.status == 504:
            continue
        if status.status != 200:
            return ControlReply(
                502, f"{worker} was lost while {request.command} was in progress: {status.detail}"
            )
        last = status.data.get("last") or {}
        if last.get("ticket") == ticket:
            return ControlReply(last["status"], last["detail"], last["data"])
        if status.data.get("ticket") != ticket:
            return ControlReply(502, f"{worker} was restarted while {request.command} was in progress")
    return ControlReply(504, f"{request.command} is still in progress after {within_s:g} s; see its status")


async def _request(ports: Ports, worker: str, request: ControlRequest, timeout_s: float) -> ControlReply:
    subject = subjects.control(ports.ns, worker)
    try:
        data = await ports.bus.request(subject, _encode(request), timeout_s=timeout_s)
    except NoResponder:
        return ControlReply(404, f"no worker {worker} answers: `headwater ctl list` lists the workers")
    except BusError as error:
        return ControlReply(504, f"worker {worker}: {error}")
    return _reply.decode(data)


async def worker_leases(ports: Ports) -> dict[str, Lease]:
    """The present leases of workers, by name."""
    return {
        lease.name: lease for lease in await LeaseTable(ports.leases).read_all() if lease.kind == "worker"
    }


async def list_workers(ports: Ports, by: str = "") -> list[dict[str, Any]]:
    """Every worker of every pool: its lease, and its status where it answers."""
    held = await worker_leases(ports)
    replies = await asyncio.gather(
        *(_request(ports, name, ControlRequest("status", by=by), STATUS_S) for name in held)
    )
    return [
        {
            "worker": lease.name,
            "pool": lease.pool,
            "host": lease.host,
            "pid": lease.pid,
            **(status.data if status.status == 200 else {"state": "silent", "detail": status.detail}),
        }
        for lease, status in zip(held.values(), replies, strict=True)
    ]


async def request_split(ports: Ports, pool: str, request: SplitRequest) -> SplitReply:
    """Show or set a pool's traffic split at one of its routers. Where none answers, the reply says so (404, 504)."""
    subject = subjects.traffic_split(ports.ns, pool)
    try:
        data = await ports.bus.request(subject, _encode(request), timeout_s=WEIGHTS_S)
    except NoResponder:
        detail = f"no router of pool {pool} answers: start one, of this release or a later one"
        return SplitReply(ControlReply(404, detail))
    except BusError as error:
        return SplitReply(ControlReply(504, f"the router of pool {pool}: {error}"))
    return _split_reply.decode(data)


async def request_weights(ports: Ports, pool: str, request: WeightsRequest) -> WeightsReply:
    """Show or set a pool's engine weights at one of its routers. Where none answers, the reply says so (404, 504)."""
    subject = subjects.engine_weights(ports.ns, pool)
    try:
        data = await ports.bus.request(subject, _encode(request), timeout_s=WEIGHTS_S)
    except NoResponder:
        return WeightsReply(ControlReply(404, f"no router of pool {pool} answers: start one"))
    except BusError as error:
        return WeightsReply(ControlReply(504, f"the router of pool {pool}: {error}"))
    return _weights_reply.decode(data)
