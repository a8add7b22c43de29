"""The `Engine` contract on the KV cache: what is reused, and what is announced about it."""

import pytest

from headwater.engines.engine import KvEvent
from headwater.schemas import hashing
from headwater.schemas.events.kv import BlocksCleared, BlocksStored
from tests.support.ports.engines import EngineCase, rebuilt
from tests.support.ports.waiting import eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]


def stored_blocks(events: list[KvEvent]) -> list[tuple[int, int]]:
    """(parent, hash) of each block in stored events, in order."""
    blocks: list[tuple[int, int]] = []
    for event in events:
        if isinstance(event, BlocksStored):
            parent = event.parent
            for number in hashing.unpack_hashes(event.hashes).tolist():
                blocks.append((parent, number))
                parent = number
    return blocks


def chain(root: int, hashes: hashing.U64) -> list[tuple[int, int]]:
    """(parent, hash) of the blocks of one prompt."""
    numbers = hashes.tolist()
    return list(zip([root, *numbers], numbers))


async def test_prompt_blocks_are_announced_under_the_edges_names(engine_case: EngineCase) -> None:
    """Exactly the full blocks, each behind its parent, with the sequence hashes that an edge computes."""
    prompt, before = engine_case.prompt(3.5), len(engine_case.kv.events)
    await engine_case.generate(prompt, max_tokens=2)
    hashes = engine_case.hashes(prompt)
    await engine_case.holds(hashes)
    assert stored_blocks(engine_case.kv.events[before:]) == chain(hashing.ROOT, hashes)


async def test_blocks_of_the_answer_are_announced_too(engine_case: EngineCase) -> None:
    """A conversation's next turn finds the last answer in the cache."""
    size = engine_case.info.block_size
    prompt, before = engine_case.prompt(1.5), len(engine_case.kv.events)
    answer = await engine_case.generate(prompt, max_tokens=2 * size)
    whole = prompt + answer.tokens
    hashes = engine_case.hashes(whole)
    assert len(hashes) == 3
    await engine_case.holds(hashes)
    assert stored_blocks(engine_case.kv.events[before:]) == chain(hashing.ROOT, hashes)
    next_turn = await engine_case.generate(whole + engine_case.prompt(1), max_tokens=2)
    assert next_turn.cached_tokens == 3 * size


async def test_shared_prefix_is_reused_block_by_block(engine_case: EngineCase) -> None:
    """The second prompt's cached tokens are the full blocks that it shares, and its own ones are new."""
    size = engine_case.info.block_size
    prefix = engine_case.prompt(3)
    first = await engine_case.generate(prefix + engine_case.prompt(0.5), max_tokens=2)
    assert first.cached_tokens == 0
    await engine_case.holds(engine_case.hashes(prefix))
    before = len(engine_case.kv.events)
    longer = prefix + engine_case.prompt(1.5)
    second = await engine_case.generate(longer, max_tokens=2)
    assert second.cached_tokens == 3 * size
    hashes = engine_case.hashes(longer)
    await engine_case.holds(hashes)
    assert stored_blocks(engine_case.kv.events[before:]) == chain(hashing.ROOT, hashes)[3:]


async def test_partly_shared_block_is_not_reused(engine_case: EngineCase) -> None:
    """One other token in the second block leaves the first one only."""
    size = engine_case.info.block_size
    prompt = engine_case.prompt(3.5)
    await engine_case.generate(prompt, max_tokens=2)
    await engine_case.holds(engine_case.hashes(prompt))
    other = [*prompt[: 2 * size - 1], 251, *prompt[2 * size :]]
    assert (await engine_case.generate(other, max_tokens=2)).cached_tokens == size


async def test_whole_prompt_in_the_cache_leaves_something_to_compute(engine_case: EngineCase) -> None:
    """The last token is always computed, so of exactly full blocks the last one does not count as cached."""
    size = engine_case.info.block_size
    prompt = engine_case.prompt(3)
    await engine_case.generate(prompt, max_tokens=2)
    await engine_case.holds(engine_case.hashes(prompt))
    again = await engine_case.generate(prompt, max_tokens=2)
    assert again.cached_tokens == 2 * size
    await eventually(lambda: rebuilt(engine_case) == +engine_case.kv.held)


async def test_other_salt_shares_nothing(engine_case: EngineCase) -> None:
    """Tenants with different salts never share a block, and their blocks have different names."""
    size = engine_case.info.block_size
    prompt = engine_case.prompt(3.5)
    await engine_case.generate(prompt, max_tokens=2)
    await engine_case.holds(engine_case.hashes(prompt))
    before = len(engine_case.kv.events)
    for salt in ("tenant-a", "tenant-b"):
        assert (await engine_case.generate(prompt, salt, max_tokens=2)).cached_tokens == 0
        await engine_case.holds(engine_case.hashes(prompt, salt))
        assert (await engine_case.generate(prompt, salt, max_tokens=2)).cached_tokens == 3 * size
    expected = [
        block
        for salt in ("tenant-a", "tenant-b")
        for block in chain(hashing.seed("", salt), engine_case.hashes(prompt, salt))
    ]
    assert stored_blocks(engine_case.kv.events[before:]) == expected


async def test_same_prompts_at_once_announce_no_more_than_is_held(engine_case: EngineCase) -> None:
    """However many copies an engine keeps meanwhile, the events and `held_blocks` agree."""
    prompt = engine_case.prompt(3.5)
    answers = [engine_case.submit(engine_case.request(prompt, max_tokens=4)) for _ in range(4)]
    for answer in answers:
        await answer.ended()
    await engine_case.idle()
    await engine_case.holds(engine_case.hashes(prompt))
    await eventually(lambda: rebuilt(engine_case) == +engine_case.kv.held)


async def test_held_blocks_rebuild_what_was_announced(engine_case: EngineCase) -> None:
    """A clear and the held blocks give the same fold as all events since the start, parents first."""
    prefix = engine_case.prompt(2)
    for tail in (0.5, 1.5, 2.5):
        prompt = prefix + engine_case.prompt(tail)
        await engine_case.generate(prompt, max_tokens=2)
        await engine_case.holds(engine_case.hashes(prompt))
    await eventually(lambda: rebuilt(engine_case) == +engine_case.kv.held)
    known = {hashing.ROOT, hashing.seed("", "tenant-a"), hashing.seed("", "tenant-b")}
    for parent, block in stored_blocks(list(engine_case.engine.held_blocks())):
        assert parent in known
        known.add(block)


async def test_cleared_cache_is_empty_and_says_so(engine_case: EngineCase) -> None:
    """Nothing is reused after it, and whoever reads the events knows it with the next request at the latest."""
    old, new = engine_case.prompt(3.5), engine_case.prompt(2.5)
    await engine_case.generate(old, max_tokens=2)
    await engine_case.holds(engine_case.hashes(old))
    before = len(engine_case.kv.events)
    await engine_case.engine.clear_kv()
    await engine_case.generate(new, max_tokens=2)
    await engine_case.holds(engine_case.hashes(new))
    assert any(isinstance(event, BlocksCleared) for event in engine_case.kv.events[before:])
    expected = {(0, 0, number): 1 for number in engine_case.hashes(new).tolist()}
    await eventually(lambda: +engine_case.kv.held == expected)
    await eventually(lambda: rebuilt(engine_case) == expected)
    assert (await engine_case.generate(old, max_tokens=2)).cached_tokens == 0
