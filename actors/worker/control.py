"""Control commands on their way to a worker and back: executed there, one at a time, each with a reply and a record in the log.

Subjects in
    hw.<ns>.worker.<worker>.control, while the worker holds its lease
While a command runs
    another gets 409, with the one that runs. Read-only commands are answered at once; `resume` and `stop` abandon a
    drain that waits
If a command takes longer than `ANSWER_S`
    the reply is 202 with a ticket, and `status` reports the result: a server lets a worker answer a message for a
    minute only
While the worker stops
    every command but the read-only ones gets 409

The client side is for `headwater ctl`, the admin port and the console: commands to a worker, and the engine weights and traffic splits of a pool.
"""

import asyncio
from typing import Any, Final

import msgspec
import structlog

from headwater.actors.runtime.ports import BusError, Message, NoResponder, Ports
from headwater.actors.runtime.tables import LeaseTable
from headwater.actors.worker.control_commands import (
    CommandRefused,
    Commands,
    WorkerContext,
    WrongArguments,
    parse,
    without_secrets,
)
from headwater.actors.worker.incarnation import CommandAudit
from headwater.engines.engine import EngineError, NotSupported, RequestRejected
from headwater.schemas import subjects
from headwater.schemas.control import (
    Command,
    ControlReply,
    ControlRequest,
    SplitReply,
    SplitRequest,
    WeightsReply,
    WeightsRequest,
)
from headwater.schemas.tables import Lease

ANSWER_S = 45.0
BY_MAX = 200

READ_ONLY: Final[tuple[Command, ...]] = ("status", "list-loras")
"""Commands that change nothing: executed concurrently with any other, and not in the audit."""

ABANDONS_A_DRAIN: Final[tuple[Command, ...]] = ("resume", "stop")

_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(ControlRequest)

_log = structlog.get_logger("headwater.control")


class WorkerControl:
    """The commands to one worker, executed one at a time. Executed commands are recorded in `audit`."""

    def __init__(self, worker: WorkerContext, audit: CommandAudit) -> None:
        self._worker = worker
        self._audit = audit
        self._commands = Commands(worker)
        self._lock = asyncio.Lock()
        self._busy: Command | None = None
        self._ticket = ""
        self._last: dict[str, Any] = {}

    async def on_message(self, message: Message) -> None:
        """Accept one command. Does not wait for it."""
        try:
            request = _request.decode(message.data)
        except msgspec.DecodeError as error:
            _log.warning("control_unreadable", worker=self._worker.name, reason=str(error))
            await self._reply(message, ControlReply(400, f"unreadable command: {error}"))
            return
        request = msgspec.structs.replace(request, by=_printable(request.by))
        self._worker.spawn(self._serve(request, message), "control")

    async def _serve(self, request: ControlRequest, message: Message) -> None:
        ticket = self._worker.ports.ids()
        outcome: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()

        async def execute() -> None:
            reply = await self._execute_in_turn(request, ticket)
            if not outcome.done():
                outcome.set_result(reply)

        self._worker.spawn(execute(), f"control {request.command}")
        await asyncio.wait({outcome}, timeout=ANSWER_S)
        if outcome.done():
            reply = outcome.result()
        else:
            detail = f"{request.command} is in progress; `status` reports its result"
            reply = ControlReply(202, detail, {"ticket": ticket})
        await self._reply(message, reply)
        if request.command == "stop" and reply.status == 200:
            self._worker.stop()

    async def _execute_in_turn(self, request: ControlRequest, ticket: str) -> ControlReply:
        """Execute the command, or refuse it while another runs; never raises."""
        command = request.command
        if command in READ_ONLY:
            reply = await self._execute(request)
            return self._with_progress(reply) if command == "status" else reply
        if self._busy == "drain" and command in ABANDONS_A_DRAIN:
            self._commands.abandon_drain.set()
        elif self._busy is not None:
            detail = f"{self._busy} is in progress: wait for it"
            return self._record(request, ControlReply(409, detail, {"busy": self._busy}))
        async with self._lock:
            self._busy, self._ticket = command, ticket
            try:
                reply = await self._execute(request)
            finally:
                self._busy, self._ticket = None, ""
            outcome = msgspec.to_builtins(msgspec.structs.asdict(reply))
            self._last = {"ticket": ticket, "command": command, **outcome}
        return self._record(request, reply)

    async def _execute(self, request: ControlRequest) -> ControlReply:
        if self._worker.status.stopping and request.command not in READ_ONLY:
            return ControlReply(409, "the worker is stopping")
        try:
            return await self._commands.execute(request.command, parse(request.command, request.arguments))
        except WrongArguments as error:
            return ControlReply(400, str(error))
        except CommandRefused as error:
            return ControlReply(error.status, str(error))
        except NotSupported as error:
            return ControlReply(501, str(error), {"capability": error.capability})
        except ValueError as error:
            return ControlReply(400, f"{request.command}: {error}")
        except EngineError as error:
            # Errors of LoRA adapters have a status of their own.
            status = getattr(error, "status", 400 if isinstance(error, RequestRejected) else 502)
            return ControlReply(status, f"{request.command}: {error}")
        except TimeoutError as error:
            return ControlReply(504, f"{request.command}: {error or 'it took too long'}")
        except Exception as error:
            _log.exception("control_failed", worker=self._worker.name, command=request.command)
            return ControlReply(
                500, f"{request.command}: {type(error).__name__}; see the worker's log for details"
            )

    def _with_progress(self, reply: ControlReply) -> ControlReply:
        progress = {"busy": self._busy or "", "ticket": self._ticket, "last": self._last}
        return msgspec.structs.replace(reply, data={**reply.data, **progress})

    def _record(self, request: ControlRequest, reply: ControlReply) -> ControlReply:
        """Record the command in the pool log, and in the process's own."""
        _log.info(
            "command_executed",
            worker=self._worker.name,
            command=request.command,
            by=request.by,
            status=reply.status,
            detail=reply.detail,
        )
        self._audit.record(
            msgspec.structs.replace(request, arguments=without_secrets(request.arguments)), reply
        )
        return reply

    async def _reply(self, message: Message, reply: ControlReply) -> None:
        if not message.reply:
            return
        try:
            await self._worker.ports.bus.publish(message.reply, _encode(reply))
        except BusError as error:
            _log.warning("control_reply_publish_failed", worker=self._worker.name, reason=str(error))


def _printable(by: str) -> str:
    """Return the text without characters that could change a terminal or a log line."""
    return "".join(char if char.isprintable() else "?" for char in by)[:BY_MAX]


REPLY_S = ANSWER_S + 10.0
STATUS_S = 3.0
POLL_S = 0.5
WEIGHTS_S = 10.0
"""Longer than a router waits for its log."""

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
    reply = await _send_request(ports, worker, request, min(REPLY_S, within_s))
    if reply.status != 202:
        return reply
    ticket = reply.data.get("ticket", "")
    while clock.monotonic_s() < deadline:
        await clock.sleep(POLL_S)
        status = await _send_request(ports, worker, ControlRequest("status", by=request.by), STATUS_S)
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


async def _send_request(ports: Ports, worker: str, request: ControlRequest, timeout_s: float) -> ControlReply:
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
        *(_send_request(ports, name, ControlRequest("status", by=by), STATUS_S) for name in held)
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
