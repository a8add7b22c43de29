"""The network of simulated processes: a bus that delivers messages late, twice or not at all, and HTTP without sockets.

As with NATS, the order of one publisher's messages on one subject is preserved, but not across subjects.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import Any, Protocol

from headwater.actors.http.asgi import Asgi
from headwater.actors.runtime.actor import cancel_all
from headwater.actors.runtime.ports import (
    BusClosed,
    Handler,
    Message,
    NoResponder,
    QueuedSubscription,
    ReplyTimeout,
)
from headwater.ops.sim.loop import Group, VirtualLoop
from headwater.schemas.subjects import matches

WALL_NS = 1_800_000_000_000_000_000
"""Wall-clock time at the start of a run."""


class Process:
    """A process of the simulated fleet. Its ports check whether it is alive and connected."""

    def __init__(self, name: str, loop: VirtualLoop) -> None:
        self.name = name
        self.alive = True
        self.connected = True
        self.wall_offset_s = 0.0
        self.slow_reader_s = 0.0
        self.ids = 0
        self.group = Group(name)
        self._loop = loop
        self._reconnected = asyncio.Event()
        self._on_kill: list[Callable[[], None]] = []

    def start(self, work: Awaitable[Any], name: str) -> "asyncio.Task[Any]":
        """Run `work` as this process."""

        async def main() -> Any:
            return await work

        return self._loop.start(self.group, main(), f"{self.name}: {name}")

    def on_kill(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the process is killed, in place of the kernel."""
        self._on_kill.append(callback)

    def die(self) -> None:
        """End the process: its actions have no more effect on others."""
        self.alive = False
        for callback in self._on_kill:
            callback()
        self._on_kill.clear()

    async def kill(self) -> list[str]:
        """SIGKILL. Returns tasks that did not end.

        The tasks are cancelled, which runs their clean-up against dead ports.
        """
        self.die()
        self.heal()
        self.group.resume(self._loop)
        try:
            async with asyncio.timeout(10.0):
                await cancel_all(self.group.tasks)
        except TimeoutError:
            return [task.get_name() for task in self.group.tasks]
        return []

    def cut(self) -> None:
        """Disconnect from the network."""
        self.connected = False
        self._reconnected.clear()

    def heal(self) -> None:
        """Reconnect to the network."""
        self.connected = True
        self._reconnected.set()

    async def reconnected(self) -> None:
        """Return once connected."""
        while not self.connected:
            await self._reconnected.wait()

    def new_id(self) -> str:
        """A unique id."""
        self.ids += 1
        return f"{self.name}n{self.ids}"

    # The clock of the actors.

    def wall_ns(self) -> int:
        """See `Clock.wall_ns`."""
        return WALL_NS + round((self._loop.time() + self.wall_offset_s) * 1e9)

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        await asyncio.sleep(seconds)


# The bus.

LATENCY_S = (0.0001, 0.002)


class NetworkTrace(Protocol):
    """Receives every message that crosses the network or is stored."""

    def __call__(self, what: str, who: str, about: str, data: bytes = b"") -> None:
        """Record one event."""
        ...


class Network:
    """All subscriptions, and network faults. Probabilities apply to each delivery."""

    def __init__(self, loop: VirtualLoop, draw: random.Random, trace: NetworkTrace) -> None:
        self.drop = 0.0
        self.duplicate = 0.0
        self.delay_s = 0.0
        self._loop = loop
        self._draw = draw
        self._trace = trace
        self._exact: defaultdict[str, list[_SimSubscription]] = defaultdict(list)
        self._wild: list[_SimSubscription] = []
        self._inboxes: dict[str, tuple[Process, asyncio.Future[bytes]]] = {}
        self._inbox_numbers = 0
        self._arrival: dict[tuple[str, str, int], float] = {}
        self._numbers = 0

    def latency_s(self) -> float:
        """Latency of one message now."""
        extra = self._draw.random() * self.delay_s if self.delay_s else 0.0
        return self._draw.uniform(*LATENCY_S) + extra

    def subscriptions(self) -> list[str]:
        """All subscriptions, for finding leaks."""
        live = [*self._wild, *(subscription for several in self._exact.values() for subscription in several)]
        return sorted(f"{subscription.process.name}: {subscription.pattern}" for subscription in live)

    def open_inboxes(self) -> int:
        """Number of requests that wait for a reply."""
        return len(self._inboxes)

    def subscribe(self, subscription: "_SimSubscription") -> None:
        """Start deliveries to a subscription."""
        self._numbers += 1
        subscription.number = self._numbers
        if "*" in subscription.pattern or ">" in subscription.pattern:
            self._wild.append(subscription)
        else:
            self._exact[subscription.pattern].append(subscription)

    def unsubscribe(self, subscription: "_SimSubscription") -> None:
        """Stop deliveries to a subscription."""
        for several in (self._wild, self._exact.get(subscription.pattern, [])):
            if subscription in several:
                several.remove(subscription)
        if not self._exact.get(subscription.pattern, True):
            del self._exact[subscription.pattern]

    def open_inbox(self, process: Process) -> tuple[str, asyncio.Future[bytes]]:
        """An inbox for one reply."""
        self._inbox_numbers += 1
        name = f"_INBOX.{self._inbox_numbers}"
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._inboxes[name] = (process, answer)
        return name, answer

    def close_inbox(self, name: str) -> None:
        """Remove an inbox."""
        self._inboxes.pop(name, None)

    def publish(self, source: Process, message: Message) -> int:
        """Send; returns the number of addressed subscriptions."""
        if not source.connected:
            return 1
        if message.subject.startswith("_INBOX."):
            return self._answer(source, message)
        matching = list(self._exact.get(message.subject, ()))
        matching += [
            subscription for subscription in self._wild if matches(subscription.pattern, message.subject)
        ]
        chosen = [subscription for subscription in matching if not subscription.queue]
        for queue in sorted({subscription.queue for subscription in matching if subscription.queue}):
            chosen.append(
                self._draw.choice([subscription for subscription in matching if subscription.queue == queue])
            )
        for subscription in chosen:
            self._send(source, subscription, message)
        return len(chosen)

    def _answer(self, source: Process, message: Message) -> int:
        waiting = self._inboxes.get(message.subject)
        if waiting is None:
            return 0
        if self._draw.random() < self.drop:
            self._trace("dropped", source.name, "answer")
            return 1
        self._loop.later(self.latency_s(), self._deliver_answer, message)
        return 1

    def _deliver_answer(self, message: Message) -> None:
        process, answer = self._inboxes.get(message.subject, (None, None))
        if process is not None and answer is not None and process.connected and not answer.done():
            answer.set_result(message.data)

    def _send(self, source: Process, target: "_SimSubscription", message: Message) -> None:
        if self._draw.random() < self.drop:
            self._trace("dropped", source.name, message.subject)
            return
        for _ in range(2 if self._draw.random() < self.duplicate else 1):
            channel = (source.name, message.subject, target.number)
            at = max(self._loop.time() + self.latency_s(), self._arrival.get(channel, 0.0))
            self._arrival[channel] = at
            self._loop.later(at - self._loop.time(), self._deliver, target, message)

    def _deliver(self, target: "_SimSubscription", message: Message) -> None:
        if target.reachable:
            self._trace("delivered", target.process.name, message.subject, message.data)
            target.deliver(message)


class SimBus:
    """See `headwater.actors.runtime.ports.Bus`: one process's side of the network."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    async def publish(self, subject: str, data: bytes) -> None:
        """See `Bus.publish`."""
        if self._process.alive and subject:
            self._network.publish(self._process, Message(subject, data, ""))

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """See `Bus.request`."""
        if not self._process.alive:
            raise BusClosed("the process has ended")
        name, answer = self._network.open_inbox(self._process)
        try:
            if not self._network.publish(self._process, Message(subject, data, name)):
                await asyncio.sleep(self._network.latency_s())
                raise NoResponder(f"no subscriber on {subject}")
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise ReplyTimeout(f"no answer on {subject} within {timeout_s} s") from error
        finally:
            self._network.close_inbox(name)

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> "_SimSubscription":
        """See `Bus.subscribe`."""
        subscription = _SimSubscription(self._network, self._process, subject, handler, queue)
        if self._process.alive:
            self._network.subscribe(subscription)
            self._process.on_kill(subscription.drop)
        return subscription


class _SimSubscription(QueuedSubscription):
    """A subscription of a process, which ends with it."""

    def __init__(
        self, network: Network, process: Process, subject: str, handler: Handler, queue: str
    ) -> None:
        self.process = process
        self.number = 0
        self._live = True
        self._network = network
        super().__init__(subject, handler, queue, lambda _: self.drop())

    @property
    def reachable(self) -> bool:
        """May messages be delivered to it?"""
        return self._live and self.process.alive and self.process.connected

    def drop(self) -> None:
        """Stop deliveries."""
        if self._live:
            self._live = False
            self._network.unsubscribe(self)


# HTTP: an edge's application is called directly, by clients that may disconnect or be disconnected.


class Reset(Exception):
    """The connection was reset: the edge ended."""


class SimConnection:
    """One request's connection: its client side and its server side."""

    def __init__(self, path: str, body: bytes, network: Network, loop: VirtualLoop) -> None:
        self.path = path
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.ended = False
        self._body: list[bytes] = [body]
        self._network = network
        self._loop = loop
        self._hung_up = asyncio.Event()
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._arrives_at = 0.0

    async def receive(self) -> dict[str, Any]:
        """ASGI: the body, then the client's disconnect."""
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        """ASGI: the response, delivered to the client in order."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = dict(message["headers"])
            return
        self._arrives_at = max(self._arrives_at, self._loop.time() + self._network.latency_s())
        self._loop.later(self._arrives_at - self._loop.time(), self._arrive, message)

    def _arrive(self, message: dict[str, Any]) -> None:
        if self.ended:
            return
        if message["body"]:
            self._arrived.put_nowait(message["body"])
        if not message.get("more_body"):
            self.ended = True
            self._arrived.put_nowait(None)

    def reset(self) -> None:
        """The server closes the connection."""
        if not self.ended:
            self.ended = True
            self.status = -1
            self._arrived.put_nowait(None)

    def hang_up(self) -> None:
        """The client disconnects."""
        self._hung_up.set()

    async def part(self) -> bytes | None:
        """The next part of the body, None at its end. Raises `Reset`."""
        part = await self._arrived.get()
        if part is None and self.status == -1:
            raise Reset
        return part


class SimHttpServer:
    """See `headwater.actors.http.server.HttpServer`. `connect` is the clients' side."""

    def __init__(self, network: Network, loop: VirtualLoop, name: str) -> None:
        self.url = f"sim://{name}"
        self.listening = asyncio.Event()
        self._network = network
        self._loop = loop
        self._app: Asgi | None = None
        self._context: Context | None = None
        self._stopped = asyncio.Event()
        self._open: dict[asyncio.Task[None], SimConnection] = {}

    async def serve(self, app: Asgi) -> None:
        """See `HttpServer.serve`."""
        self._app, self._context = app, copy_context()
        self.listening.set()
        await self._stopped.wait()
        self._app = None
        if self._open:
            await asyncio.wait(list(self._open))

    def stop(self) -> None:
        """See `HttpServer.stop`."""
        self._stopped.set()

    def close(self) -> None:
        """See `HttpServer.close`."""
        self.kill()

    def kill(self) -> None:
        """Refuse and reset all connections, as the kernel does for a process that ended."""
        self._app = None
        for connection in self._open.values():
            connection.reset()

    def connect(
        self, path: str, body: bytes, headers: list[tuple[bytes, bytes]], method: str = ""
    ) -> SimConnection:
        """Send a request; without a `method`: a POST if there is a body. Raises `Reset` without a listening server."""
        if self._app is None:
            raise Reset
        connection = SimConnection(path, body, self._network, self._loop)
        bare, _, query = path.partition("?")
        method = method or ("POST" if body else "GET")
        scope = {
            "type": "http",
            "path": bare,
            "query_string": query.encode(),
            "method": method,
            "headers": headers,
        }
        task = self._loop.create_task(
            self._app(scope, connection.receive, connection.send), name=f"http {path}", context=self._context
        )
        self._open[task] = connection
        task.add_done_callback(self._forget, context=Context())
        return connection

    def _forget(self, task: asyncio.Task[None]) -> None:
        connection = self._open.pop(task)
        if task.cancelled() or task.exception() is not None:
            connection.reset()
