"""The cards of LoRA adapters as a worker sees them: which are there, which names are taken, and which went away."""

from collections.abc import Callable

import msgspec
import structlog

from headwater.actors.world import World
from headwater.engines.adapter_files import AdapterError
from headwater.events.errors import LogError
from headwater.schemas import subjects
from headwater.schemas.card import AdapterCard, ModelCard

TRIES_MAX = 5
FOLLOW_AGAIN_S = 1.0

_log = structlog.get_logger("headwater.adapters")


class AdapterCards:
    """Adapter cards of one pool. All calls raise `AdapterError` 502 where the table does not answer.

    `on_gone` is called with the card of an adapter that was forgotten.
    """

    def __init__(self, world: World, pool: str, on_gone: Callable[[AdapterCard], None]) -> None:
        self._world = world
        self._pool = pool
        self._on_gone = on_gone
        self._cards: dict[str, AdapterCard] = {}
        self._models: dict[str, tuple[str, ...]] = {}

    async def follow(self) -> None:
        """Follow the table for ever."""
        while True:
            try:
                async for entries in self._world.cards.watch():
                    for entry in entries:
                        self._take(entry.key, entry.value)
            except LogError as error:
                _log.warning("cards_not_followed", reason=str(error))
            await self._world.clock.sleep(FOLLOW_AGAIN_S)

    def _take(self, key: str, value: bytes | None) -> None:
        before = self._cards.pop(key, None)
        self._models.pop(key, None)
        if value is not None:
            try:
                if subjects.card_pool(key):
                    model = msgspec.json.decode(value, type=ModelCard)
                    self._models[key] = (model.name, *model.aliases)
                else:
                    self._cards[key] = msgspec.json.decode(value, type=AdapterCard)
            except msgspec.DecodeError as error:
                _log.warning("card_unreadable", card=key, reason=str(error))
        after = self._cards.get(key)
        gone = before is not None and (after is None or after.identity != before.identity)
        if before is not None and gone and before.pool == self._pool:
            self._on_gone(before)

    def names(self) -> list[str]:
        """Adapters that this pool's workers may load, by name."""
        return sorted(card.name for card in self._cards.values() if card.pool == self._pool)

    async def find(self, name: str) -> AdapterCard | None:
        """The card of an adapter, as it is now."""
        try:
            entry = await self._world.cards.get(subjects.adapter_key(self._pool, name))
            if entry is None or entry.value is None:
                return None
            return msgspec.json.decode(entry.value, type=AdapterCard)
        except (LogError, msgspec.DecodeError) as error:
            raise AdapterError(502, f"the card of adapter {name} can not be read: {error}") from error

    async def check(self, card: AdapterCard) -> None:
        """Raises `AdapterError` 409 if the name means something else already."""
        for names in self._models.values():
            if card.name in names:
                raise AdapterError(409, f"{card.name} is a model: give the adapter another name")
        for other in self._cards.values():
            if other.name == card.name and other.pool != card.pool:
                raise AdapterError(
                    409, f"{card.name} is an adapter of pool {other.pool}: give it another name"
                )
        _same(await self.find(card.name), card)

    async def publish(self, card: AdapterCard) -> None:
        """Make the adapter a model of the fleet. Raises `AdapterError` 409 where it has other weights there."""
        key, value = subjects.adapter_key(card.pool, card.name), msgspec.json.encode(card)
        for _ in range(TRIES_MAX):
            present = await self.find(card.name)
            if present is not None:
                return _same(present, card)
            try:
                if await self._world.cards.create(key, value) is not None:
                    return None
            except LogError as error:
                raise AdapterError(502, f"the card of adapter {card.name} was not stored: {error}") from error
        raise AdapterError(409, f"the card of adapter {card.name} is being changed by others: try again")

    async def forget(self, name: str) -> None:
        """The adapter is no model of the fleet any more. Again is fine."""
        try:
            await self._world.cards.delete(subjects.adapter_key(self._pool, name))
        except LogError as error:
            raise AdapterError(502, f"the card of adapter {name} was not deleted: {error}") from error


def _same(present: AdapterCard | None, card: AdapterCard) -> None:
    if present is not None and present.digest != card.digest:
        raise AdapterError(
            409,
            f"adapter {card.name} has other weights in this pool ({present.digest[:12]} from {present.source}, not "
            f"{card.digest[:12]}): give the new ones a name of their own, or forget the old adapter first",
        )
