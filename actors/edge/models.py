"""The models an edge serves: cards from the card table, tokenizers and templates from the object store."""

import asyncio
from typing import NamedTuple

import msgspec
import structlog

from headwater.actors.edge.errors import no_model
from headwater.actors.edge.template import ChatTemplate
from headwater.actors.edge.tokens import Tokenizer
from headwater.actors.world import World
from headwater.events.errors import LogError
from headwater.schemas.card import ModelCard
from headwater.schemas.subjects import artifact_name

RETRY_S = 0.5

_log = structlog.get_logger("headwater.models")


class Model(NamedTuple):
    """A model ready to serve. `template` is None for a model without chat."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None


class Models:
    """All models by name, kept up to date by `run`. Tokenizers are shared by digest."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._by_pool: dict[str, Model] = {}
        self._tokenizers: dict[str, Tokenizer] = {}
        self._wanted: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        self.known = asyncio.Event()

    def get(self, name: str) -> Model:
        """The model called `name`, or that has it as an alias: names go first. Raises `ApiError` 404."""
        models = [self._by_pool[pool] for pool in sorted(self._by_pool)]
        for model in models:
            if model.card.name == name:
                return model
        for model in models:
            if name in model.card.aliases:
                return model
        raise no_model(name, [card.name for card in self.cards()])

    def cards(self) -> list[ModelCard]:
        """Cards of the served models, by name."""
        return sorted((model.card for model in self._by_pool.values()), key=lambda card: card.name)

    async def run(self) -> None:
        """Follow the card table for ever. A card whose files can not be had now is tried again."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="cards")
            group.create_task(self._load_wanted(), name="models")

    async def _watch(self) -> None:
        async for entries in self._world.cards.watch():
            for entry in entries:
                if entry.value is None:
                    self._by_pool.pop(entry.key, None)
                    self._wanted.pop(entry.key, None)
                else:
                    self._wanted[entry.key] = entry.value
            self._changed.set()

    async def _load_wanted(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for key, value in list(self._wanted.items()):
                try:
                    await self._load(value)
                except LogError as error:
                    _log.warning("model_waits", card=key, reason=str(error))
                    continue
                except (msgspec.DecodeError, ValueError) as error:
                    _log.error("model_not_loaded", card=key, reason=str(error))
                if key not in self._wanted:
                    # Taken away while it was being loaded.
                    self._by_pool.pop(key, None)
                elif self._wanted[key] == value:
                    del self._wanted[key]
            if self._wanted:
                self._changed.set()
                await self._world.clock.sleep(RETRY_S)
            else:
                self.known.set()

    async def _load(self, value: bytes) -> None:
        card = msgspec.json.decode(value, type=ModelCard)
        present = self._by_pool.get(card.pool)
        if present is not None and present.card == card:
            return
        tokenizer = self._tokenizers.get(card.tokenizer)
        if tokenizer is None:
            data = await self._artifact(card.tokenizer)
            # Building the byte table takes some 0.1 s: streams must not wait for it.
            tokenizer = await asyncio.to_thread(Tokenizer, data, card.eos_token_ids)
            self._tokenizers[card.tokenizer] = tokenizer
        template = None
        if card.chat_template:
            source = (await self._artifact(card.chat_template)).decode()
            template = await asyncio.to_thread(ChatTemplate, source, card.special_tokens)
        self._by_pool[card.pool] = Model(card, tokenizer, template)
        _log.info("model_served", model=card.name, pool=card.pool)

    async def _artifact(self, digest: str) -> bytes:
        data = await self._world.blobs.get(artifact_name(digest))
        if data is None:
            raise ValueError(f"its file {digest[:12]} is not in the object store: restart a worker of it")
        return data
