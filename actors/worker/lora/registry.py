"""The LoRA cards as a worker sees them: which adapters exist, which names are taken, which cards were deleted."""

import asyncio

import msgspec
import structlog

from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable, LoraCardChange, ModelCardChange
from headwater.engines.lora_files import LoraError
from headwater.events.errors import LogError
from headwater.schemas.tables.card import LoraCard

TRIES_MAX = 5
RETRY_S = 1.0

_log = structlog.get_logger("headwater.lora")


class LoraRegistry:
    """LoRA cards of one pool. All calls raise `LoraError` 502 where the card table does not answer.

    `deleted` queues each card that was deleted, or replaced by one with other weights, `lost` each that was lost with its table.
    """

    def __init__(self, ports: Ports, pool: str) -> None:
        self.deleted: asyncio.Queue[LoraCard] = asyncio.Queue()
        self.lost: asyncio.Queue[LoraCard] = asyncio.Queue()
        self._table = CardTable(ports.cards)
        self._clock = ports.clock
        self._pool = pool
        self._cards: dict[str, LoraCard] = {}
        self._models: dict[str, tuple[str, ...]] = {}

    async def watch(self) -> None:
        """Follow the card table. Does not return."""
        while True:
            try:
                async for changes in self._table.watch():
                    for change in changes:
                        if isinstance(change, ModelCardChange):
                            self._set_model(change)
                        else:
                            self._set_lora(change)
            except LogError as error:
                _log.warning("card_watch_failed", reason=str(error))
            await self._clock.sleep(RETRY_S)

    def _set_model(self, change: ModelCardChange) -> None:
        if change.card is None:
            self._models.pop(change.pool, None)
        else:
            self._models[change.pool] = (change.card.name, *change.card.aliases)

    def _set_lora(self, change: LoraCardChange) -> None:
        if change.lost:
            # No operator has forgotten it: a worker that has it loaded publishes it again.
            if (lost := self._cards.pop(change.key, None)) is not None and lost.pool == self._pool:
                self.lost.put_nowait(lost)
            return
        before = self._cards.pop(change.key, None)
        if change.card is not None:
            self._cards[change.key] = change.card
        if before is None or before.pool != self._pool:
            return
        if change.card is None or change.card.identity != before.identity:
            self.deleted.put_nowait(before)

    def names(self) -> list[str]:
        """Adapters that this pool's workers may load, sorted."""
        return sorted(card.name for card in self._cards.values() if card.pool == self._pool)

    async def read_card(self, name: str) -> LoraCard | None:
        """The card of an adapter, read from the table."""
        try:
            return await self._table.get_lora(self._pool, name)
        except (LogError, msgspec.DecodeError) as error:
            raise LoraError(502, f"the card of adapter {name} cannot be read: {error}") from error

    async def check_name(self, card: LoraCard) -> None:
        """Raises `LoraError` 409 if the name is taken by a model or by another adapter."""
        for names in self._models.values():
            if card.name in names:
                raise LoraError(409, f"{card.name} is a model: give the adapter another name")
        for other in self._cards.values():
            if other.name == card.name and other.pool != card.pool:
                raise LoraError(409, f"{card.name} is an adapter of pool {other.pool}: give it another name")
        _check_same_weights(await self.read_card(card.name), card)

    async def publish_card(self, card: LoraCard) -> None:
        """Make the adapter a model of the fleet. Raises `LoraError` 409 if it has other weights there."""
        for _ in range(TRIES_MAX):
            present = await self.read_card(card.name)
            if present is not None:
                return _check_same_weights(present, card)
            try:
                if await self._table.create_lora(card):
                    return None
            except LogError as error:
                raise LoraError(502, f"the card of adapter {card.name} was not stored: {error}") from error
        raise LoraError(409, f"the card of adapter {card.name} is being changed by others: try again")

    async def delete_card(self, name: str) -> None:
        """Remove the adapter from the fleet's models. Again is fine."""
        try:
            await self._table.delete_lora(self._pool, name)
        except LogError as error:
            raise LoraError(502, f"the card of adapter {name} was not deleted: {error}") from error


def _check_same_weights(present: LoraCard | None, card: LoraCard) -> None:
    if present is not None and present.digest != card.digest:
        raise LoraError(
            409,
            f"adapter {card.name} has other weights in this pool ({present.digest[:12]} from {present.source}, not "
            f"{card.digest[:12]}): give the new ones a name of their own, or forget the old adapter first",
        )
