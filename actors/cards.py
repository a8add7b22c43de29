"""Publishing a model card: the files an edge needs into the object store, then the card that names them."""

import hashlib
from typing import NamedTuple

import msgspec

from headwater.actors.world import World
from headwater.engines.engine import Engine, EngineInfo
from headwater.engines.model_files import ModelFiles
from headwater.schemas import subjects
from headwater.schemas.card import ModelCard
from headwater.schemas.names import pool_name


class Served(NamedTuple):
    """A model as it is to be served: under which name and which others, with which files and parsers."""

    name: str
    files: ModelFiles
    aliases: tuple[str, ...] = ()
    tool_parser: str = ""
    reasoning_parser: str = ""


async def publish(world: World, served: Served, engine: Engine, info: EngineInfo) -> ModelCard:
    """Store what is missing and write the card. Publishing the same card again changes nothing."""
    files = served.files
    card = ModelCard(
        name=served.name,
        pool=pool_name(info.model, info.block_size),
        block_size=info.block_size,
        context_length=info.context_length,
        tokenizer=await _store(world, files.tokenizer),
        chat_template=await _store(world, files.chat_template.encode()) if files.chat_template else "",
        special_tokens=files.special_tokens,
        eos_token_ids=files.eos_token_ids,
        engine=engine.name,
        capabilities=tuple(sorted(engine.capabilities)),
        created_s=world.clock.wall_ns() // 1_000_000_000,
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
    )
    key = subjects.card_key(card.pool)
    present = await world.cards.get(key)
    if present is not None and present.value is not None:
        before = msgspec.json.decode(present.value, type=ModelCard)
        if msgspec.structs.replace(before, created_s=0) == msgspec.structs.replace(card, created_s=0):
            return before
    await world.cards.put(key, msgspec.json.encode(card))
    return card


async def _store(world: World, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    name = subjects.artifact_name(digest)
    # Asked for, not read: a worker needs no right to read what others stored.
    if not await world.blobs.has(name):
        await world.blobs.put(name, data)
    return digest
