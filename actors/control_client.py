"""The asking side of control: one command to one worker, and who is there at all. For `headwater ctl` and the admin."""

import asyncio
from typing import Any

import msgspec

from headwater.actors.bus_port import BusError, NoResponder
from headwater.actors.control import ANSWER_S
from headwater.actors.lease import decode_lease
from headwater.actors.world import World
from headwater.schemas import subjects
from headwater.schemas.card import Lease
from headwater.schemas.control import ControlReply, ControlRequest

REPLY_S = ANSWER_S + 10.0
LOOK_S = 3.0
POLL_S = 0.5

_encode = msgspec.msgpack.Encoder().encode
_reply = msgspec.msgpack.Decoder(ControlReply)


async def control(
    world: World, worker: str, request: ControlRequest, *, within_s: float = 900.0
) -> ControlReply:
    """Have a worker do something; waits for its end, however long that takes, up to `within_s` (then 504).

    404: no worker of that name answers. Raises `InvalidName`.
    """
    clock = world.clock
    deadline = clock.monotonic_s() + within_s
    reply = await _ask(world, worker, request, min(REPLY_S, within_s))
    if reply.status != 202:
        return reply
    ticket = reply.data.get("ticket", "")
    while clock.monotonic_s() < deadline:
        await clock.sleep(POLL_S)
        look = await _ask(world, worker, ControlRequest("status", by=request.by), LOOK_S)
        if look.status == 504:
            continue
        if look.status != 200:
            return ControlReply(
                502, f"{worker} was lost while {request.command} was under way: {look.detail}"
            )
        last = look.data.get("last") or {}
        if last.get("ticket") == ticket:
            return ControlReply(last["status"], last["detail"], last["data"])
        if look.data.get("ticket") != ticket:
            return ControlReply(502, f"{worker} was started again while {request.command} was under way")
    return ControlReply(504, f"{request.command} is still under way after {within_s:g} s; see its status")


async def _ask(world: World, worker: str, request: ControlRequest, timeout_s: float) -> ControlReply:
    subject = subjects.control(world.ns, worker)
    try:
        data = await world.bus.request(subject, _encode(request), timeout_s=timeout_s)
    except NoResponder:
        return ControlReply(404, f"no worker {worker} answers: `headwater ctl list` shows who is there")
    except BusError as error:
        return ControlReply(504, f"worker {worker}: {error}")
    return _reply.decode(data)


async def leased(world: World) -> dict[str, Lease]:
    """Workers with a lease, by name."""
    async for entries in world.leases.watch():
        found = {}
        for entry in entries:
            kind, _, name = entry.key.partition(".")
            held = decode_lease(entry)
            if kind == "worker" and held is not None:
                found[name] = held
        return dict(sorted(found.items()))
    return {}


async def roster(world: World, by: str = "") -> list[dict[str, Any]]:
    """Every worker of every pool: what its lease says and what it says itself, where it answers."""
    held = await leased(world)
    looks = await asyncio.gather(
        *(_ask(world, name, ControlRequest("status", by=by), LOOK_S) for name in held)
    )
    return [
        {
            "worker": name,
            "pool": lease.pool,
            "host": lease.host,
            "pid": lease.pid,
            **(look.data if look.status == 200 else {"state": "silent", "detail": look.detail}),
        }
        for (name, lease), look in zip(held.items(), looks, strict=True)
    ]
