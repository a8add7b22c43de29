"""The bus between simulated processes: messages are delivered late, twice or not at all.

As with NATS, the order of one publisher's messages on one subject is preserved, but not across subjects.
"""

import asyncio
import random
from collections import defaultdict
from typing import Protocol

from headwater.actors.bus.memory import QueuedSubscription, matches
from headwater.actors.bus.port import BusClosed, Handler, Message, NoResponder, ReplyTimeout
from headwater.ops.sim.loop import VirtualLoop
from headwater.ops.sim.process import Process

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
        live = [*self._wild, *(one for several in self._exact.values() for one in several)]
        return sorted(f"{one.process.name}: {one.pattern}" for one in live)

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
        matching += [one for one in self._wild if matches(one.pattern, message.subject)]
        chosen = [one for one in matching if not one.queue]
        for queue in sorted({one.queue for one in matching if one.queue}):
            chosen.append(self._draw.choice([one for one in matching if one.queue == queue]))
        for one in chosen:
            self._send(source, one, message)
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
    """See `headwater.actors.bus.port.Bus`: one process's side of the network."""

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
