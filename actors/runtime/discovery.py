"""Service discovery: answers `$SRV.PING|INFO|STATS` like any NATS service, so the stock `nats` tool lists the fleet."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from headwater import __version__
from headwater.actors.bus.port import Bus, Message, Subscription
from headwater.schemas.subjects import service

Verb = Literal["PING", "INFO", "STATS"]


class Requests(msgspec.Struct):
    """How many requests an actor has taken since it started, and how many of them it refused or failed."""

    total: int = 0
    errors: int = 0


class ServiceEndpoint:
    """One actor's entry. It answers on its own subscriptions, so that it never queues after the actor's messages."""

    def __init__(
        self,
        bus: Bus,
        kind: str,
        name: str,
        stats: Callable[[], dict[str, Any]],
        requests: Requests | None = None,
    ) -> None:
        self._requests = requests or Requests()
        self._bus = bus
        self._identity = {
            "name": f"headwater-{kind}",
            "id": name,
            "version": __version__,
            "metadata": {"kind": kind},
        }
        self._stats = stats
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Subscribe."""
        name, service_id = str(self._identity["name"]), str(self._identity["id"])
        answers: tuple[tuple[Verb, Callable[[], dict[str, Any]]], ...] = (
            ("PING", self._ping),
            ("INFO", self._info),
            ("STATS", self._stats_reply),
        )
        for verb, answer in answers:
            for subject in (service(verb), service(verb, name), service(verb, name, service_id)):
                self._subscriptions.append(await self._bus.subscribe(subject, self._handler(answer)))

    async def stop(self) -> None:
        """Unsubscribe."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()

    def _handler(self, answer: Callable[[], dict[str, Any]]) -> Callable[[Message], Any]:
        async def handle(message: Message) -> None:
            if message.reply:
                await self._bus.publish(message.reply, msgspec.json.encode(answer()))

        return handle

    def _ping(self) -> dict[str, Any]:
        return {"type": "io.nats.micro.v1.ping_response", **self._identity}

    def _info(self) -> dict[str, Any]:
        return {
            "type": "io.nats.micro.v1.info_response",
            **self._identity,
            "description": "Headwater actor",
            "endpoints": [],
        }

    def _stats_reply(self) -> dict[str, Any]:
        data = self._stats()
        endpoint = {
            "name": "actor",
            "subject": "",
            "num_requests": self._requests.total,
            "num_errors": self._requests.errors,
            "data": data,
        }
        return {"type": "io.nats.micro.v1.stats_response", **self._identity, "endpoints": [endpoint]}
