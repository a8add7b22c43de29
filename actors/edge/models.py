"""The models an edge serves: cards from the card table, tokenizers and templates from the object store.

An adapter is a model like any other, with its base model's tokenizer, template and limits. It is served while both
their cards are there.
"""

import asyncio
from typing import NamedTuple

import msgspec
import structlog

from headwater.actors.edge.errors import no_model
from headwater.actors.edge.template import ChatTemplate
from headwater.actors.edge.tokens import Tokenizer
from headwater.actors.world import World
from headwater.events.errors import LogError
from headwater.schemas.card import AdapterCard, ModelCard
from headwater.schemas.subjects import artifact_name, card_pool

RETRY_S = 0.5

_log = structlog.get_logger("headwater.models")


class Model(NamedTuple):
    """A model ready to serve. `template` is None for a model without chat.

    An adapter has its base model's card under its own name. `lora_name` is what routers and workers know it by, and
    `parent` is its base model's name; both are empty for a base model.
    """

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
    lora_name: str = ""
    parent: str = ""


class Models:
    """All models by name, kept up to date by `run`. Tokenizers are shared by digest."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._by_pool: dict[str, Model] = {}
        self._adapters: dict[str, AdapterCard] = {}
        self._tokenizers: dict[str, Tokenizer] = {}
        self._wanted: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        self.known = asyncio.Event()

    def get(self, name: str) -> Model:
        """The model called `name`, or that has it as an alias: names go first. Raises `ApiError` 404."""
        models = self.all()
        for model in models:
            if model.card.name == name:
                return model
        for model in models:
            if name in model.card.aliases:
                return model
        raise no_model(name, [model.card.name for model in models])

    def all(self) -> list[Model]:
        """All served models: base models by name, then adapters by name."""
        bases = sorted(self._by_pool.values(), key=lambda model: model.card.name)
        taken = {model.card.name for model in bases}
        adapters = [
            _with_adapter(self._by_pool[card.pool], card)
            for card in self._adapters.values()
            if card.pool in self._by_pool and card.name not in taken
        ]
        return bases + sorted(adapters, key=lambda model: model.card.name)

    def cards(self) -> list[ModelCard]:
        """Cards of the base models, by name."""
        return sorted((model.card for model in self._by_pool.values()), key=lambda card: card.name)

    async def run(self) -> None:
        """Follow the card table for ever. A card whose files can not be had now is tried again."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="cards")
            group.create_task(self._load_wanted(), name="models")

    async def _watch(self) -> None:
        async for entries in self._world.cards.watch():
            for entry in entries:
                if not card_pool(entry.key):
                    self._take_adapter(entry.key, entry.value)
                elif entry.value is None:
                    self._by_pool.pop(entry.key, None)
                    self._wanted.pop(entry.key, None)
                else:
                    self._wanted[entry.key] = entry.value
            self._changed.set()

    def _take_adapter(self, key: str, value: bytes | None) -> None:
        """An adapter's card needs nothing fetched: it counts at once."""
        self._adapters.pop(key, None)
        if value is not None:
            try:
                self._adapters[key] = msgspec.json.decode(value, type=AdapterCard)
            except msgspec.DecodeError as error:
                _log.error("adapter_not_served", card=key, reason=str(error))

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


def _with_adapter(base: Model, adapter: AdapterCard) -> Model:
    card = msgspec.structs.replace(base.card, name=adapter.name, created_s=adapter.created_s, aliases=())
    return base._replace(card=card, lora_name=adapter.identity, parent=base.card.name)
