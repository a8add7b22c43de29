"""Publishing a model card: first the files that an edge needs, into the object store, then the card that names them."""

import hashlib
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable
from headwater.engines.engine import Engine, EngineInfo
from headwater.engines.model_files import ModelFiles
from headwater.schemas import subjects
from headwater.schemas.names import pool_name
from headwater.schemas.tables.card import MediaSupport, ModelCard

_log = structlog.get_logger("headwater.worker")


class Served(NamedTuple):
    """A model as it is to be served: its name and aliases, files and parsers."""

    name: str
    files: ModelFiles
    aliases: tuple[str, ...] = ()
    tool_parser: str = ""
    reasoning_parser: str = ""


async def publish_card(ports: Ports, served: Served, engine: Engine, info: EngineInfo) -> ModelCard:
    """Store the files that are missing and write the card. Publishing the same card again changes nothing."""
    files = served.files
    card = ModelCard(
        name=served.name,
        pool=pool_name(info.model, info.block_size),
        block_size=info.block_size,
        context_length=info.context_length,
        tokenizer=await _store_artifact(ports, files.tokenizer),
        chat_template=await _store_artifact(ports, files.chat_template.encode())
        if files.chat_template
        else "",
        special_tokens=files.special_tokens,
        eos_token_ids=files.eos_token_ids,
        engine=engine.name,
        capabilities=tuple(sorted(engine.capabilities)),
        created_s=ports.clock.wall_ns() // 1_000_000_000,
        aliases=served.aliases,
        engine_version=info.version,
        total_blocks=info.total_blocks,
        max_running=info.max_running,
        tool_parser=served.tool_parser,
        reasoning_parser=served.reasoning_parser,
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
        response_template=await _store_artifact(ports, files.response_template.encode())
        if files.response_template
        else "",
    )
    table = CardTable(ports.cards)
    present = await table.get_model(card.pool)
    card = with_engines_of(card, present)
    if present is not None and replace(present, created_s=0) == replace(card, created_s=0):
        return present
    if present is not None and present.tokenizer != card.tokenizer:
        _log.warning("tokenizer_differs", pool=card.pool, before=present.tokenizer, now=card.tokenizer)
    if present is not None and present.media_processor not in ("", card.media_processor):
        _log.warning(
            "media_processor_differs",
            pool=card.pool,
            before=present.media_processor,
            now=card.media_processor,
        )
    await table.put_model(card)
    return card


def with_engines_of(card: ModelCard, present: ModelCard | None) -> ModelCard:
    """One engine's card of a pool, with the capabilities of the other engines in the `present` one.

    A request needs one engine that is capable of it: a router keeps it from the others.
    """
    engines = {**(present.engines if present is not None else {}), card.engine: card.capabilities}
    either = {capability for capabilities in engines.values() for capability in capabilities}
    known = {name: getattr(card, name) for name in (*MediaSupport._fields, "image_embeddings")}
    if present is not None:
        known |= {
            name: getattr(present, name) for name, own in known.items() if own is None and name in either
        }
        limits = {name: most for name, most in present.media_tokens_max.items() if name != card.engine}
        known["media_tokens_max"] = {**limits, **card.media_tokens_max}
        if not card.media_processor and any(known[name] is not None for name in MediaSupport._fields):
            known["media_processor"] = present.media_processor
    return replace(card, engines=engines, capabilities=tuple(sorted(either)), **known)


def media_processor(files: ModelFiles, info: EngineInfo) -> str:
    """The digest of all settings with which a worker turns media into its model's input, "" for a model without media.

    They are those of the model's files and those that the engine was started with. Equal values mean equal input from equal pixels and samples.
    """
    if not info.media.capabilities and info.speech is None:
        return ""
    return hashlib.sha256(f"{files.media_processor}\0{info.media_settings}".encode()).hexdigest()


async def _store_artifact(ports: Ports, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    name = subjects.artifact_name(digest)
    # Checked, not read: a worker needs no permission to read what others stored.
    if not await ports.blobs.has(name):
        await ports.blobs.put(name, data)
    return digest
