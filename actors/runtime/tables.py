"""Typed access to the tables of leases, cards and API keys (the one place that decodes their values), and service discovery.

A value that cannot be decoded (of another release, or written by hand) is logged and skipped: whatever was known
under its key before stays known. An API key that cannot be decoded is not valid.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import structlog

from headwater import __version__
from headwater.actors.runtime.ports import Bus, Message, Subscription
from headwater.events.table import Table, TableEntry
from headwater.schemas import subjects
from headwater.schemas.subjects import service
from headwater.schemas.tables import ApiKey, Lease, LeaseKind, LoraCard, ModelCard

_log = structlog.get_logger("headwater.tables")

T = TypeVar("T")


class LeaseChange(NamedTuple):
    """A change of one lease. `lease` is None where it was released or has lapsed."""

    kind: str
    name: str
    lease: Lease | None


class ModelCardChange(NamedTuple):
    """A change of one pool's model card. `card` is None where it was deleted."""

    pool: str
    card: ModelCard | None


class LoraCardChange(NamedTuple):
    """A change of one LoRA card. `card` is None where it was deleted, or, `lost`, where the table was."""

    key: str
    card: LoraCard | None
    lost: bool = False


class ApiKeyChange(NamedTuple):
    """A change of one API key. `key` is None where it was revoked or cannot be decoded."""

    id: str
    key: ApiKey | None


CardChange = ModelCardChange | LoraCardChange


def decode_lease(entry: TableEntry) -> Lease | None:
    """The lease in an entry of the lease table; None where it was released or has lapsed. Raises `DecodeError`."""
    return None if entry.value is None else msgspec.json.decode(entry.value, type=Lease)


class LeaseTable:
    """Leases by kind and name. Every method raises `LogError` where the table does not answer."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def watch(self) -> AsyncIterator[list[LeaseChange]]:
        """Yield the present leases at once (an empty list where there are none), then every change."""
        async with _closing(self._table.watch()) as watch:
            async for entries in watch:
                changes = []
                for entry in entries:
                    kind, _, name = entry.key.partition(".")
                    try:
                        changes.append(LeaseChange(kind, name, decode_lease(entry)))
                    except msgspec.DecodeError as error:
                        _log.error("lease_unreadable", key=entry.key, reason=str(error))
                yield changes

    async def read_all(self) -> list[Lease]:
        """The present leases, by kind and name."""
        held = [change.lease for change in await _first(self.watch()) if change.lease is not None]
        return sorted(held, key=lambda lease: (lease.kind, lease.name))

    async def get(self, kind: LeaseKind, name: str) -> Lease | None:
        """One lease, None if it is free."""
        entry = await self._table.get(subjects.lease_key(kind, name))
        return None if entry is None else decode_lease(entry)

    async def delete(self, kind: LeaseKind, name: str) -> None:
        """Remove a lease; watchers see that it ended."""
        await self._table.delete(subjects.lease_key(kind, name))


class CardTable:
    """Model cards by pool, LoRA cards by pool and name. Every method raises `LogError` where the table does not answer."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def watch(self) -> AsyncIterator[list[CardChange]]:
        """Yield the present cards at once (an empty list where there are none), then every change."""
        async with _closing(self._table.watch()) as watch:
            async for entries in watch:
                changes: list[CardChange] = []
                for entry in entries:
                    try:
                        changes.append(_card_change(entry))
                    except msgspec.DecodeError as error:
                        _log.error("card_unreadable", key=entry.key, reason=str(error))
                yield changes

    async def watch_pools(self) -> AsyncIterator[list[str]]:
        """Yield the pools that have a model card at once, sorted, then those whose card was written again."""
        async with _closing(self._table.watch()) as watch:
            async for entries in watch:
                yield sorted(
                    entry.key
                    for entry in entries
                    if entry.value is not None and subjects.card_pool(entry.key)
                )

    async def pools(self) -> list[str]:
        """The pools that have a model card, sorted."""
        return await _first(self.watch_pools())

    async def models(self) -> list[ModelCard]:
        """The present model cards."""
        return [
            change.card
            for change in await _first(self.watch())
            if isinstance(change, ModelCardChange) and change.card is not None
        ]

    async def get_model(self, pool: str) -> ModelCard | None:
        """A pool's model card. Raises `DecodeError`."""
        found = await self.get_model_entry(pool)
        return None if found is None else found[0]

    async def get_model_entry(self, pool: str) -> tuple[ModelCard, int] | None:
        """A pool's model card with its revision. Raises `DecodeError`."""
        return await _read(self._table, subjects.card_key(pool), ModelCard)

    async def write_model(self, card: ModelCard, revision: int | None, ttl_s: int) -> int | None:
        """Write a pool's model card if the present one has this revision, None: if there is none."""
        key, value = subjects.card_key(card.pool), msgspec.json.encode(card)
        if revision is None:
            return await self._table.create(key, value, ttl_s=ttl_s)
        return await self._table.update(key, value, revision=revision, ttl_s=ttl_s)

    async def put_model(self, card: ModelCard) -> None:
        """Write a pool's model card, whatever is there."""
        await self._table.put(subjects.card_key(card.pool), msgspec.json.encode(card))

    async def get_lora(self, pool: str, name: str) -> LoraCard | None:
        """The card of a LoRA adapter. Raises `DecodeError`."""
        found = await _read(self._table, subjects.lora_key(pool, name), LoraCard)
        return None if found is None else found[0]

    async def create_lora(self, card: LoraCard) -> bool:
        """Write the card of a LoRA adapter; False where there is one already."""
        key = subjects.lora_key(card.pool, card.name)
        return await self._table.create(key, msgspec.json.encode(card)) is not None

    async def delete_lora(self, pool: str, name: str) -> None:
        """Remove the card of a LoRA adapter. Again is fine."""
        await self._table.delete(subjects.lora_key(pool, name))


class ApiKeyTable:
    """API keys by id. Every method raises `LogError` where the table does not answer."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def watch(self) -> AsyncIterator[list[ApiKeyChange]]:
        """Yield the present keys at once (an empty list where there are none), then every change."""
        async with _closing(self._table.watch()) as watch:
            async for entries in watch:
                yield [_api_key_change(entry) for entry in entries]

    async def read_all(self) -> list[ApiKey]:
        """The present keys, by tenant and name."""
        keys = [change.key for change in await _first(self.watch()) if change.key is not None]
        return sorted(keys, key=lambda key: (key.tenant, key.name, key.id))

    async def create(self, key: ApiKey) -> bool:
        """Write a new key; False where there is one with its id."""
        return await self._table.create(key.id, msgspec.json.encode(key)) is not None

    async def get(self, key_id: str) -> tuple[ApiKey, int] | None:
        """A key with its revision. Raises `DecodeError`."""
        return await _read(self._table, key_id, ApiKey)

    async def replace(self, key: ApiKey, revision: int) -> bool:
        """Write a key if it still has this revision."""
        return await self._table.update(key.id, msgspec.json.encode(key), revision=revision) is not None

    async def delete(self, key_id: str) -> None:
        """Revoke a key. Again is fine."""
        await self._table.delete(key_id)


def _api_key_change(entry: TableEntry) -> ApiKeyChange:
    key = None
    if entry.value is not None:
        try:
            key = msgspec.json.decode(entry.value, type=ApiKey)
        except msgspec.DecodeError as error:
            _log.error("api_key_unreadable", key=entry.key, reason=str(error))
    return ApiKeyChange(entry.key, key)


def _card_change(entry: TableEntry) -> CardChange:
    pool = subjects.card_pool(entry.key)
    if pool:
        card = None if entry.value is None else msgspec.json.decode(entry.value, type=ModelCard)
        return ModelCardChange(pool, card)
    lora = None if entry.value is None else msgspec.json.decode(entry.value, type=LoraCard)
    return LoraCardChange(entry.key, lora, entry.lost)


async def _read(table: Table, key: str, kind: type[T]) -> tuple[T, int] | None:
    """The value under a key, with its revision; None if there is none. Raises `DecodeError`."""
    entry = await table.get(key)
    if entry is None or entry.value is None:
        return None
    return msgspec.json.decode(entry.value, type=kind), entry.revision


async def _first(watch: AsyncIterator[list[T]]) -> list[T]:
    """The first batch of a watch, which then ends."""
    async with _closing(watch) as batches:
        return await anext(batches, [])


@asynccontextmanager
async def _closing(watch: AsyncIterator[list[T]]) -> AsyncIterator[AsyncIterator[list[T]]]:
    """Ends a watch with the block: a cursor must not wait for the garbage collector."""
    try:
        yield watch
    finally:
        if isinstance(watch, AsyncGenerator):
            await watch.aclose()


# Service discovery: answers `$SRV.PING|INFO|STATS`, so that the stock `nats` tool lists the fleet.

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
