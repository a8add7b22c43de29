"""The card of a pool's model, and the files that it names: written by its workers, compared by them, and kept by them.

A pool has one model. A worker whose model is another one, or whose engine has other blocks, ends with an error that names both, before
it takes a lease: see `CardKeeper.check`. The card and its files are written again whenever they are lost, as leases are, and the card
expires `CARD_TTL_S` after the last worker of the pool has ended.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, NamedTuple, TypeVar

import structlog
from msgspec.structs import replace

from headwater import __version__
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable, LeaseTable
from headwater.engines.engine import Engine, EngineInfo, EngineUnavailable
from headwater.engines.model_files import ModelFiles
from headwater.events.ports import LogError, LogUnavailable, sha256
from headwater.schemas import subjects
from headwater.schemas.names import REVISION_MAX, pool_name
from headwater.schemas.tables import MIGRATIONS_MAX, MediaSupport, ModelCard

CARD_TTL_S: Final = 900
"""A model whose last worker has ended is unavailable for this long; then it no longer exists. Longer than any restart of a fleet."""

KEEP_S: Final = 3.0
"""Seconds between two looks at the card and its files."""

RETRY_S: Final = 1.0
"""Seconds between two attempts of a worker that starts while the store does not answer."""

LOST_WAIT_S: Final = 10.0
"""How long a worker that starts waits for the lost card of a pool that has workers."""

T = TypeVar("T")

_log = structlog.get_logger("headwater.worker")


class Served(NamedTuple):
    """A model as it will be served: its name and aliases, files and parsers, and how often its requests may migrate."""

    name: str
    files: ModelFiles
    aliases: tuple[str, ...] = ()
    tool_parser: str = ""
    reasoning_parser: str = ""
    migrations_max: int = MIGRATIONS_MAX


class CardKeeper:
    """One worker's part in the card of its pool."""

    def __init__(
        self, ports: Ports, served: Served, engine: Engine, info: EngineInfo, worker: str = ""
    ) -> None:
        self._ports = ports
        self._worker = worker
        self._table = CardTable(ports.cards)
        self.own = own_card(served, engine, info, ports.clock.wall_ns() // 1_000_000_000)
        """The card as this worker alone would write it."""
        files = served.files
        texts = (text.encode() for text in (files.chat_template, files.response_template) if text)
        self._artifacts = {sha256(data): data for data in (files.tokenizer, *texts)}
        self._last = self.own
        """The card as it was seen last: also what other engines have added to it."""
        self._seen = (0, 0.0)
        """Revision of the card, and when it was seen first."""

    async def publish(self) -> ModelCard:
        """Store the files that are missing and write the card, as soon as the store takes them. Publishing the same card again changes nothing.

        Raises `EngineUnavailable`: see `check`.
        """
        return await self._once_available(self._publish)

    async def check(self) -> None:
        """Compare with what live workers serve, as soon as that can be read.

        Raises `EngineUnavailable` for another model in this pool, or other blocks of this model.
        """
        await self._once_available(self._check)

    async def _once_available(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The engine has loaded, perhaps for minutes: while NATS elects leaders, or is away, it waits."""
        reported = False
        while True:
            try:
                return await attempt()
            except LogUnavailable as error:
                if not reported:
                    _log.warning("model_card_awaited", pool=self.own.pool, reason=str(error))
                    reported = True
                await self._ports.clock.sleep(RETRY_S)

    async def _publish(self) -> ModelCard:
        await self._store_files()
        while True:
            await self._check()
            entry = await self._table.get_model_entry(self.own.pool)
            present, revision = entry if entry is not None else (None, None)
            if present is not None and difference(self.own, present):
                # What an earlier run left: no worker serves it.
                present = None
            card = with_engines_of(self.own, present)
            if present is not None and replace(present, created_s=0) == replace(card, created_s=0):
                self._last = present
                return present
            if present is not None:
                _warn_of_changes(present, card)
            if await self._table.write_model(card, revision, CARD_TTL_S) is not None:
                self._last = card
                return card

    async def _check(self) -> None:
        worker_card = self.own
        waited_s = 0.0
        while True:
            leases = await LeaseTable(self._ports.leases).read_all()
            others = [lease for lease in leases if lease.kind == "worker" and lease.name != self._worker]
            live = {lease.pool: lease.name for lease in others}
            present = await self._table.get_model(worker_card.pool)
            # Encode workers write no card.
            is_lost = present is None and any(
                lease.pool == worker_card.pool and lease.serves in ("whole", "prefill", "decode")
                for lease in others
            )
            if not is_lost or waited_s >= LOST_WAIT_S:
                break
            # The card was lost: whose it is, its workers will write again.
            await self._ports.clock.sleep(1.0)
            waited_s += 1.0
        if present is not None and worker_card.pool in live and difference(worker_card, present):
            raise misfit(worker_card, present, live[worker_card.pool])
        check_block_size(worker_card.name, worker_card.block_size, await self._table.models(), live)

    async def run(self) -> None:
        """Write again what is lost. Does not return. Raises `EngineUnavailable` once the card is another model's."""
        while True:
            await self._ports.clock.sleep(KEEP_S)
            try:
                await self._store_files()
                await self._keep()
            except LogError as error:
                _log.warning("model_card_not_kept", pool=self.own.pool, reason=str(error))

    async def _keep(self) -> None:
        entry = await self._table.get_model_entry(self.own.pool)
        if entry is None:
            if await self._table.write_model(self._last, None, CARD_TTL_S) is not None:
                _log.warning("model_card_restored", pool=self.own.pool)
            return
        card, revision = entry
        if difference(self.own, card):
            # Both started at once: this one was the first to write.
            raise misfit(self.own, card, "another worker")
        self._last = card
        now_s = self._ports.clock.monotonic_s()
        if self.own.engine not in card.engines:
            await self._table.write_model(with_engines_of(self.own, card), revision, CARD_TTL_S)
        elif self._seen[0] != revision:
            self._seen = (revision, now_s)
        elif now_s - self._seen[1] >= CARD_TTL_S / 3:
            # Whichever worker is first renews it.
            await self._table.write_model(card, revision, CARD_TTL_S)

    async def _store_files(self) -> None:
        blobs = self._ports.blobs
        for digest, data in self._artifacts.items():
            name = subjects.artifact_name(digest)
            # Checked, not read: a worker needs no permission to read what others stored.
            if not await blobs.has(name):
                await blobs.put(name, data)


def own_card(served: Served, engine: Engine, info: EngineInfo, now_s: int) -> ModelCard:
    """The card as this worker alone would write it."""
    files = served.files
    return ModelCard(
        name=served.name,
        pool=pool_name(served.name, info.block_size),
        block_size=info.block_size,
        context_length=info.context_length,
        tokenizer=sha256(files.tokenizer),
        chat_template=sha256(files.chat_template.encode()) if files.chat_template else "",
        special_tokens=files.special_tokens,
        eos_token_ids=files.eos_token_ids,
        engine=engine.name,
        capabilities=tuple(sorted(engine.capabilities)),
        created_s=now_s,
        aliases=served.aliases,
        engine_version=info.version,
        total_blocks=info.total_blocks,
        max_running=info.max_running,
        tool_parser=served.tool_parser,
        reasoning_parser=served.reasoning_parser,
        migrations_max=served.migrations_max,
        logits_processors=info.processors,
        pooling_tasks=info.tasks,
        lora_slots=info.lora_slots,
        lora_rank_max=info.lora_rank_max,
        vocabulary=info.vocabulary,
        logprobs_max=info.logprobs_max,
        default_sampling=dict(info.default_sampling),
        **info.media._asdict(),
        image_embeddings=info.image_embeddings,
        speech=info.speech,
        image_generation=info.image_generation,
        video_generation=info.video_generation,
        media_processor=media_processor(files, info),
        media_tokens_max={engine.name: dict(info.media_tokens_max)} if info.media_tokens_max else {},
        response_template=sha256(files.response_template.encode()) if files.response_template else "",
        identity=files.identity,
        dtype=info.dtype,
    )


def name_revision(card: ModelCard) -> str:
    """The revision of a worker that is given none: its engine and model, and this release, as its own card has them."""
    parts = (card.engine, card.engine_version, card.identity[:8], f"hw{__version__}")
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", "-".join(part for part in parts if part))[:REVISION_MAX]


def check_block_size(name: str, block_size: int, cards: Iterable[ModelCard], live: Mapping[str, str]) -> None:
    """Refuse a block size other than that in which a model is served. `live`: pools with workers, each with one of them.

    Raises `EngineUnavailable`.
    """
    for card in cards:
        if card.name == name and card.pool in live and card.block_size != block_size:
            raise EngineUnavailable(
                f"--block-size {block_size}: worker {live[card.pool]} of pool {card.pool} serves {name} in blocks of {card.block_size} tokens, "
                f"and pool {pool_name(name, block_size)} cannot share them; start with --block-size {card.block_size}, or under another "
                "--served-model-name or --namespace"
            )


def difference(worker_card: ModelCard, present: ModelCard) -> str:
    """Return what shows that two cards of one pool are of different models, "" if nothing does. What is not known is not compared."""
    if worker_card.identity and present.identity and worker_card.identity != present.identity:
        return "identity"
    # Engines of different kinds exchange no KV, and may name their types differently.
    is_comparable = worker_card.engine == present.engine and worker_card.dtype and present.dtype
    return "dtype" if is_comparable and worker_card.dtype != present.dtype else ""


def misfit(worker_card: ModelCard, present: ModelCard, worker: str) -> EngineUnavailable:
    """The error of a worker that does not fit its pool, where `worker` serves another model."""
    if difference(worker_card, present) == "dtype":
        return EngineUnavailable(
            f"dtype {worker_card.dtype}: worker {worker} of pool {worker_card.pool} serves {present.name} in {present.dtype}, and their KV must be alike"
        )
    return EngineUnavailable(
        f"model {worker_card.name} ({worker_card.identity[:12]}) does not fit pool {worker_card.pool}, where worker {worker} serves {present.name} "
        f"({present.identity[:12]}): give it another --served-model-name or --namespace"
    )


def _warn_of_changes(present: ModelCard, card: ModelCard) -> None:
    if present.tokenizer != card.tokenizer:
        _log.warning("tokenizer_differs", pool=card.pool, before=present.tokenizer, now=card.tokenizer)
    if present.media_processor not in ("", card.media_processor):
        _log.warning(
            "media_processor_differs",
            pool=card.pool,
            before=present.media_processor,
            now=card.media_processor,
        )


def with_engines_of(card: ModelCard, present: ModelCard | None) -> ModelCard:
    """One engine's card of a pool, with what is known of it and the capabilities of the other engines in the `present` one.

    A request needs one engine that is capable of it: a router keeps it from the others.
    """
    engines = {**(present.engines if present is not None else {}), card.engine: card.capabilities}
    either = {capability for capabilities in engines.values() for capability in capabilities}
    merged = {name: getattr(card, name) for name in (*MediaSupport._fields, "image_embeddings")}
    if present is not None:
        merged |= {
            name: getattr(present, name)
            for name, field_value in merged.items()
            if field_value is None and name in either
        }
        limits = {name: most for name, most in present.media_tokens_max.items() if name != card.engine}
        merged["media_tokens_max"] = {**limits, **card.media_tokens_max}
        if not card.media_processor and any(merged[name] is not None for name in MediaSupport._fields):
            merged["media_processor"] = present.media_processor
        merged |= {"identity": card.identity or present.identity, "dtype": card.dtype or present.dtype}
    return replace(card, engines=engines, capabilities=tuple(sorted(either)), **merged)


def media_processor(files: ModelFiles, info: EngineInfo) -> str:
    """The digest of all settings with which a worker turns media into its model's input, "" for a model without media.

    They are those of the model's files and those that the engine was started with. Equal values mean equal input from equal pixels and samples.
    """
    if not info.media.capabilities and info.speech is None:
        return ""
    return sha256(f"{files.media_processor}\0{info.media_settings}".encode())
