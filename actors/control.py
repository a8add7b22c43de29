"""The worker's side of control: one operator's command at a time, each answered, each in the log.

Subjects in
    hw.<ns>.worker.<worker>.control, while the worker holds its lease
On a second command
    409, with what runs. Commands that only look are answered at once; `resume` and `stop` end a drain that waits
On a command that takes long
    after `ANSWER_S` the answer is 202 with a ticket, and `status` tells what became of it: a server lets a worker
    answer a message for a minute only
On stop
    what runs is given up with the worker; everything but a look is refused with 409
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import structlog

from headwater.actors.bus_port import BusError, Message
from headwater.actors.control_arguments import WrongArguments, parse, without_secrets
from headwater.actors.control_commands import Commands
from headwater.actors.control_guards import Refusal
from headwater.actors.worker_life import WorkerLife
from headwater.engines.engine import EngineError, NotSupported, RequestRejected
from headwater.schemas.control import Command, ControlReply, ControlRequest

if TYPE_CHECKING:
    from headwater.actors.engine import EngineActor

ANSWER_S = 45.0
UNWRITTEN_MAX = 100
BY_MAX = 200

LOOKS: Final[tuple[Command, ...]] = ("status", "list-loras")
"""They change nothing: answered beside whatever runs, and not in the audit."""

ENDS_A_DRAIN: Final[tuple[Command, ...]] = ("resume", "stop")

_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(ControlRequest)

_log = structlog.get_logger("headwater.control")


class Adapters(Protocol):
    """LoRA adapters of one worker. Errors are `EngineError`s, whose `status` counts if they have one."""

    async def load(self, name: str, source: str) -> None:
        """Fetch an adapter and serve it. Again is fine."""
        ...

    async def unload(self, name: str, *, forget: bool = False) -> None:
        """Serve it no more here; `forget`: nowhere, and it is no model any more."""
        ...

    async def list(self) -> Sequence[dict[str, Any]]:
        """What is held: plain JSON types, each with its `name`."""
        ...


class WorkerControl:
    """See the module. `adapters` is None for a worker that serves none."""

    def __init__(self, actor: "EngineActor") -> None:
        self._actor = actor
        self._commands = Commands(actor)
        self._lock = asyncio.Lock()
        self._busy: Command | None = None
        self._ticket = ""
        self._last: dict[str, Any] = {}
        self._life: WorkerLife | None = None
        self._unwritten: deque[tuple[ControlRequest, ControlReply]] = deque(maxlen=UNWRITTEN_MAX)

    @property
    def adapters(self) -> Adapters | None:
        """Who loads adapters."""
        return self._commands.adapters

    @adapters.setter
    def adapters(self, adapters: Adapters | None) -> None:
        self._commands.adapters = adapters

    def refusal(self) -> str:
        """Why the worker takes no request now; empty if it does."""
        actor = self._actor
        if actor.stopping:
            return f"worker {actor.name} drains"
        state = actor.standing.state
        return "" if state == "ready" else f"worker {actor.name} is {state}"

    def joined(self) -> None:
        """A life began: what the one before could not tell, and what was done between the two, is told in it."""
        life = self._actor.life
        if life is None:
            return
        if self._life is not None and self._life is not life:
            self._unwritten.extendleft(reversed(self._life.unwritten))
        self._life = life
        while self._unwritten:
            life.audit(*self._unwritten.popleft())

    async def on_message(self, message: Message) -> None:
        """Take one command. Does not wait for it."""
        try:
            request = _request.decode(message.data)
        except msgspec.DecodeError as error:
            _log.warning("control_unreadable", worker=self._actor.name, reason=str(error))
            await self._reply(message, ControlReply(400, f"unreadable command: {error}"))
            return
        request = msgspec.structs.replace(request, by=_printable(request.by))
        self._actor.spawn(self._serve(request, message), "control")

    async def _serve(self, request: ControlRequest, message: Message) -> None:
        ticket = self._actor.world.ids()
        outcome: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            reply = await self._outcome(request, ticket)
            if not outcome.done():
                outcome.set_result(reply)

        self._actor.spawn(work(), f"control {request.command}")
        await asyncio.wait({outcome}, timeout=ANSWER_S)
        late = ControlReply(202, f"{request.command} is under way; status tells", {"ticket": ticket})
        reply = outcome.result() if outcome.done() else late
        await self._reply(message, reply)
        if request.command == "stop" and reply.status == 200:
            self._actor.stop()

    async def _outcome(self, request: ControlRequest, ticket: str) -> ControlReply:
        """Do it, or refuse it; never raises."""
        command = request.command
        if command in LOOKS:
            reply = await self._do(request)
            return self._with_progress(reply) if command == "status" else reply
        if self._busy == "drain" and command in ENDS_A_DRAIN:
            self._commands.give_up.set()
        elif self._busy is not None:
            return self._told(
                request,
                ControlReply(409, f"{self._busy} is under way here: wait for it", {"busy": self._busy}),
            )
        async with self._lock:
            self._busy, self._ticket = command, ticket
            try:
                reply = await self._do(request)
            finally:
                self._busy, self._ticket = None, ""
            self._last = {"ticket": ticket, "command": command, **msgspec.to_builtins(_named(reply))}
        return self._told(request, reply)

    async def _do(self, request: ControlRequest) -> ControlReply:
        if self._actor.stopping and request.command not in LOOKS:
            return ControlReply(409, "the worker is stopping")
        try:
            return await self._commands.run(request.command, parse(request.command, request.arguments))
        except WrongArguments as error:
            return ControlReply(400, str(error))
        except Refusal as error:
            return ControlReply(error.status, str(error))
        except NotSupported as error:
            return ControlReply(501, str(error), {"capability": error.capability})
        except ValueError as error:
            return ControlReply(400, f"{request.command}: {error}")
        except LookupError as error:
            return ControlReply(404, f"{request.command}: {error.args[0] if error.args else error}")
        except EngineError as error:
            # Some errors (of adapters) say themselves what they are.
            status = getattr(error, "status", 400 if isinstance(error, RequestRejected) else 502)
            return ControlReply(status, f"{request.command}: {error}")
        except TimeoutError as error:
            return ControlReply(504, f"{request.command}: {error or 'it took too long'}")
        except Exception as error:
            _log.exception("control_failed", worker=self._actor.name, command=request.command)
            return ControlReply(500, f"{request.command}: {type(error).__name__}; the worker's log says more")

    def _with_progress(self, reply: ControlReply) -> ControlReply:
        progress = {"busy": self._busy or "", "ticket": self._ticket, "last": self._last}
        return msgspec.structs.replace(reply, data={**reply.data, **progress})

    def _told(self, request: ControlRequest, reply: ControlReply) -> ControlReply:
        """Into the log, in this life or the next, and into the process's own."""
        _log.info(
            "controlled",
            worker=self._actor.name,
            command=request.command,
            by=request.by,
            status=reply.status,
            detail=reply.detail,
        )
        bare = msgspec.structs.replace(request, arguments=without_secrets(request.arguments))
        self._unwritten.append((bare, reply))
        self.joined()
        return reply

    async def _reply(self, message: Message, reply: ControlReply) -> None:
        if not message.reply:
            return
        try:
            await self._actor.world.bus.publish(message.reply, _encode(reply))
        except BusError as error:
            _log.warning("control_reply_not_sent", worker=self._actor.name, reason=str(error))


def _named(reply: ControlReply) -> dict[str, Any]:
    return {"status": reply.status, "detail": reply.detail, "data": reply.data}


def _printable(by: str) -> str:
    """A name that does no harm to a terminal or a log line."""
    return "".join(char if char.isprintable() else "?" for char in by)[:BY_MAX]
