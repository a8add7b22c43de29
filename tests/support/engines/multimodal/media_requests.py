"""Requests with media to a bare engine: their answers, the names of their blocks, and why they are rejected."""

import numpy as np
from msgspec.structs import replace

from headwater.engines.conformance.case import Answer
from headwater.schemas import hashing
from headwater.schemas.media import PromptMedia
from tests.support.ports.engines import EngineCase
from tests.support.ports.waiting import eventually


async def answer(case: EngineCase, prompt: list[int], *media: PromptMedia, salt: str = "") -> Answer:
    """One request from begin to end."""
    request = replace(case.request(prompt), media=media, cache_salt=salt)
    found = await case.submit(request).ended()
    await case.idle()
    return found


async def answer_from_cache(case: EngineCase, prompt: list[int], *media: PromptMedia) -> Answer:
    """The same answer twice, the second time with all full blocks cached; returns the first."""
    first = await answer(case, prompt, *media)
    assert first.cached_tokens == 0
    await indexed(case, prompt, *media)
    again = await answer(case, prompt, *media)
    size = case.info.block_size
    assert (again.cached_tokens, again.tokens) == (len(prompt) // size * size, first.tokens)
    return first


async def indexed(case: EngineCase, prompt: list[int], *media: PromptMedia) -> hashing.U64:
    """The names of a prompt's full blocks as an edge computes them, once the engine's KV events have reported these."""
    size = case.info.block_size
    digests = hashing.media_digests([(one.id, one.start, one.tokens) for one in media], size)
    names = hashing.sequence_hashes(np.array(prompt, np.uint32), size, multimodal=digests)
    await eventually(lambda: case.kv.holds(names))
    return names


async def rejection(case: EngineCase, prompt: list[int], *media: PromptMedia) -> str:
    """Why the engine rejects a request that it has taken."""
    found = await answer(case, prompt, *media)
    assert found.finish == "rejected"
    return found.steps[-1].detail
