"""The models an edge serves: cards from the card table, tokenizers and templates from the object store.

A LoRA adapter is a model with its base model's tokenizer, template and limits. It is served while both their cards
exist. A card that is gone ends its model after `REMOVE_AFTER_S`: if the table was lost, its workers write it again. Files that are missing
are asked for again until they are there.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import structlog

from headwater.actors.edge.chat_template import ChatTemplate
from headwater.actors.edge.parsing.response_template import ResponseTemplate, load_response_template
from headwater.actors.edge.tokenizer import Tokenizer
from headwater.actors.http.errors import no_model
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable, LoraCardChange
from headwater.events.ports import LogError
from headwater.schemas.subjects import artifact_name
from headwater.schemas.tables import LoraCard, ModelCard

RETRY_S = 0.5
REMOVE_AFTER_S = 10.0

_log = structlog.get_logger("headwater.models")


class FileMissing(Exception):
    """A file that a card names is not in the object store: its workers store it again."""


class Model(NamedTuple):
    """A model ready to serve. `template` is None for a model without chat.

    An adapter has its base model's card under its own name. `lora_name` is its name for routers and workers, and
    `parent` is its base model's name; both are empty for a base model.
    """

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
    lora_name: str = ""
    parent: str = ""
    response_template: ResponseTemplate | None = None
    """How the model's answers are read, where it says so itself."""


def endpoint_of(card: ModelCard) -> str:
    """The endpoint for a client that asked at one which this model does not serve."""
    if card.speech is not None:
        return "/v1/audio/transcriptions"
    if "generate" in card.capabilities:
        return "/v1/chat/completions"
    if card.video_generation is not None:
        return "/v1/videos"
    if card.image_generation is None:
        return "/v1/embeddings"
    return "/v1/images/generations" if "image_generation" in card.capabilities else "/v1/images/edits"


class ModelCatalog:
    """All models by name, kept current by `run`. Tokenizers are shared by digest.

    `is_live` says whether a pool has workers: of several pools with a model of one name, as an earlier run leaves them, one that has is
    served. `refresh` is to be called when that changes.
    """

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._by_pool: dict[str, Model] = {}
        self._adapters: dict[str, LoraCard] = {}
        self._tokenizers: dict[str, Tokenizer] = {}
        self._wanted: dict[str, ModelCard] = {}
        self._by_name: dict[str, Model] | None = None
        self._changed = asyncio.Event()
        self._gone: dict[str, float] = {}
        """When to remove the models whose card is gone."""
        self._missing: set[str] = set()
        """Models that wait for a file."""
        self.is_live: Callable[[str], bool] = lambda _: True
        self.known = asyncio.Event()

    def get(self, name: str) -> Model:
        """The model with this name, else with this alias. Raises `ApiError` 404."""
        if self._by_name is None:
            self._by_name = _by_name(self.all())
        model = self._by_name.get(name)
        if model is None:
            raise no_model(name, [model.card.name for model in self.all()])
        return model

    def refresh(self) -> None:
        """Other pools have workers now."""
        self._by_name = None

    def all(self) -> list[Model]:
        """All served models, one of each name: base models by name, then adapters by name."""
        named: dict[str, Model] = {}
        for model in sorted(self._by_pool.values(), key=lambda model: not self.is_live(model.card.pool)):
            named.setdefault(model.card.name, model)
        bases = sorted(named.values(), key=lambda model: model.card.name)
        base_names = {model.card.name for model in bases}
        adapters = [
            _with_adapter(self._by_pool[card.pool], card)
            for card in self._adapters.values()
            if card.pool in self._by_pool and card.name not in base_names
        ]
        return bases + sorted(adapters, key=lambda model: model.card.name)

    def cards(self) -> list[ModelCard]:
        """Cards of the base models, by name."""
        return sorted((model.card for model in self._by_pool.values()), key=lambda card: card.name)

    async def run(self) -> None:
        """Follow the card table until cancelled. A card whose files are unavailable is retried."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="cards")
            group.create_task(self._load_wanted(), name="models")
            group.create_task(self._remove_gone(), name="models that are gone")

    async def _watch(self) -> None:
        async for changes in CardTable(self._ports.cards).watch():
            for change in changes:
                if isinstance(change, LoraCardChange):
                    self._take_adapter(change)
                elif change.card is None:
                    self._wanted.pop(change.pool, None)
                    self._gone.setdefault(change.pool, self._ports.clock.monotonic_s() + REMOVE_AFTER_S)
                else:
                    self._gone.pop(change.pool, None)
                    self._wanted[change.pool] = change.card
            self._changed.set()

    def _take_adapter(self, change: LoraCardChange) -> None:
        """Register an adapter's card: it has no files to fetch."""
        if change.card is not None:
            self._gone.pop(change.key, None)
            self._adapters[change.key] = change.card
        elif change.lost:
            self._gone.setdefault(change.key, self._ports.clock.monotonic_s() + REMOVE_AFTER_S)
        else:
            self._adapters.pop(change.key, None)
        self._by_name = None

    async def _remove_gone(self) -> None:
        while True:
            await self._ports.clock.sleep(RETRY_S)
            now_s = self._ports.clock.monotonic_s()
            for key in [key for key, due_s in self._gone.items() if due_s <= now_s]:
                del self._gone[key]
                self._by_pool.pop(key, None)
                self._adapters.pop(key, None)
                self._by_name = None

    async def _load_wanted(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for key, card in list(self._wanted.items()):
                try:
                    await self._load(card)
                except LogError as error:
                    _log.warning("model_load_retrying", card=key, reason=str(error))
                    continue
                except FileMissing as error:
                    if key not in self._missing:
                        _log.error("model_not_loaded", card=key, reason=str(error))
                    self._missing.add(key)
                    continue
                except ValueError as error:
                    _log.error("model_not_loaded", card=key, reason=str(error))
                self._missing.discard(key)
                if self._wanted.get(key) == card:
                    del self._wanted[key]
            if not self._wanted.keys() - self._missing:
                # One that waits for a file holds no other up.
                self.known.set()
            if self._wanted:
                self._changed.set()
                await self._ports.clock.sleep(RETRY_S)

    async def _load(self, card: ModelCard) -> None:
        present = self._by_pool.get(card.pool)
        if present is not None and present.card == card:
            return
        tokenizer = self._tokenizers.get(card.tokenizer)
        if tokenizer is None:
            data = await self._artifact(card.tokenizer)
            # Building the byte table takes about 0.1 s: streams must not wait for it.
            tokenizer = await asyncio.to_thread(Tokenizer, data, card.eos_token_ids)
            self._tokenizers[card.tokenizer] = tokenizer
        template = None
        if card.chat_template:
            source = (await self._artifact(card.chat_template)).decode()
            template = await asyncio.to_thread(ChatTemplate, source, card.special_tokens)
        described = None
        if card.response_template:
            # An `InvalidTemplate` is a `ValueError`: the model is not served, and the log says why.
            described = load_response_template((await self._artifact(card.response_template)).decode())
        self._by_pool[card.pool] = Model(card, tokenizer, template, response_template=described)
        self._by_name = None
        _log.info("model_served", model=card.name, pool=card.pool)

    async def _artifact(self, digest: str) -> bytes:
        data = await self._ports.blobs.get(artifact_name(digest))
        if data is None:
            raise FileMissing(
                f"its file {digest[:12]} is not in the object store: its workers store it again within seconds"
            )
        return data


def _by_name(models: Sequence[Model]) -> dict[str, Model]:
    """Each model by its aliases and its name; a name hides an alias, the first model the others."""
    by_alias: dict[str, Model] = {}
    for model in models:
        for alias in model.card.aliases:
            by_alias.setdefault(alias, model)
    names: dict[str, Model] = {}
    for model in models:
        names.setdefault(model.card.name, model)
    return by_alias | names


def _with_adapter(base: Model, adapter: LoraCard) -> Model:
    card = msgspec.structs.replace(base.card, name=adapter.name, created_s=adapter.created_s, aliases=())
    return base._replace(card=card, lora_name=adapter.identity, parent=base.card.name)
