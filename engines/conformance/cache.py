"""Checks of the KV cache: what is reused, and what is announced about it."""

from headwater.engines.conformance.case import (
    EngineCase,
    Inapplicable,
    MakeEngine,
    check,
    eventually,
    rebuilt,
    started,
)
from headwater.engines.engine import KvEvent
from headwater.schemas import hashing
from headwater.schemas.events import BlocksCleared, BlocksStored

SMALL_BLOCKS_MAX = 256


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


@check("generate", "kv_events")
async def prompt_blocks_are_announced_under_the_edges_names(case: EngineCase) -> None:
    """Exactly the full blocks, each behind its parent, with the sequence hashes that an edge computes."""
    await case.settle()
    prompt, before = case.prompt(3.5), len(case.kv.events)
    await case.generate(prompt, max_tokens=2)
    hashes = case.hashes(prompt)
    await case.holds(hashes)
    assert stored_blocks(case.kv.events[before:]) == chain(hashing.ROOT, hashes)


@check("generate", "kv_events")
async def blocks_of_the_answer_are_announced_too(case: EngineCase) -> None:
    """A conversation's next turn finds the last answer in the cache."""
    size = case.info.block_size
    await case.settle()
    prompt, before = case.prompt(1.5), len(case.kv.events)
    answer = await case.generate(prompt, max_tokens=2 * size)
    turn_tokens = prompt + answer.tokens
    hashes = case.hashes(turn_tokens)
    assert len(hashes) == 3
    await case.holds(hashes)
    assert stored_blocks(case.kv.events[before:]) == chain(hashing.ROOT, hashes)
    next_turn = await case.generate(turn_tokens + case.prompt(1), max_tokens=2)
    assert next_turn.cached_tokens == 3 * size


@check("generate", "kv_events")
async def shared_prefix_is_reused_block_by_block(case: EngineCase) -> None:
    """The second prompt's cached tokens are the full blocks that it shares, and its own ones are new."""
    size = case.info.block_size
    prefix = case.prompt(3)
    first = await case.generate(prefix + case.prompt(0.5), max_tokens=2)
    assert first.cached_tokens == 0
    await case.holds(case.hashes(prefix))
    await case.settle()
    before = len(case.kv.events)
    longer = prefix + case.prompt(1.5)
    second = await case.generate(longer, max_tokens=2)
    assert second.cached_tokens == 3 * size
    hashes = case.hashes(longer)
    await case.holds(hashes)
    assert stored_blocks(case.kv.events[before:]) == chain(hashing.ROOT, hashes)[3:]


@check("generate", "kv_events")
async def partly_shared_block_is_not_reused(case: EngineCase) -> None:
    """One other token in the second block leaves the first one only."""
    size = case.info.block_size
    prompt = case.prompt(3.5)
    await case.generate(prompt, max_tokens=2)
    await case.holds(case.hashes(prompt))
    other = [*prompt[: 2 * size - 1], 251, *prompt[2 * size :]]
    assert (await case.generate(other, max_tokens=2)).cached_tokens == size


@check("generate", "kv_events", "kv_dump")
async def whole_prompt_in_the_cache_leaves_something_to_compute(case: EngineCase) -> None:
    """The last token is always computed, so of exactly full blocks the last one does not count as cached."""
    size = case.info.block_size
    prompt = case.prompt(3)
    await case.generate(prompt, max_tokens=2)
    await case.holds(case.hashes(prompt))
    again = await case.generate(prompt, max_tokens=2)
    assert again.cached_tokens == 2 * size
    await case.settle()
    await eventually(lambda: rebuilt(case) == +case.kv.held)


@check("generate", "kv_events", "cache_salt")
async def other_salt_shares_nothing(case: EngineCase) -> None:
    """Tenants with different salts never share a block, and their blocks have different names."""
    size = case.info.block_size
    prompt = case.prompt(3.5)
    await case.generate(prompt, max_tokens=2)
    await case.holds(case.hashes(prompt))
    await case.settle()
    before = len(case.kv.events)
    for salt in ("tenant-a", "tenant-b"):
        assert (await case.generate(prompt, salt, max_tokens=2)).cached_tokens == 0
        await case.holds(case.hashes(prompt, salt))
        assert (await case.generate(prompt, salt, max_tokens=2)).cached_tokens == 3 * size
    expected = [
        block
        for salt in ("tenant-a", "tenant-b")
        for block in chain(hashing.seed("", salt), case.hashes(prompt, salt))
    ]
    assert stored_blocks(case.kv.events[before:]) == expected


@check("generate", "kv_events", "kv_dump")
async def same_prompts_at_once_announce_no_more_than_is_held(case: EngineCase) -> None:
    """However many copies an engine keeps in between, the events and `held_blocks` agree."""
    prompt = case.prompt(3.5)
    answers = [case.submit(case.request(prompt, max_tokens=4)) for _ in range(4)]
    for answer in answers:
        await answer.ended()
    await case.idle()
    await case.holds(case.hashes(prompt))
    await case.settle()
    await eventually(lambda: rebuilt(case) == +case.kv.held)


@check("generate", "kv_events", "kv_dump")
async def held_blocks_rebuild_what_was_announced(case: EngineCase) -> None:
    """A clear and the held blocks give the same fold as all events since the start, parents first."""
    prefix = case.prompt(2)
    for tail in (0.5, 1.5, 2.5):
        prompt = prefix + case.prompt(tail)
        await case.generate(prompt, max_tokens=2)
        await case.holds(case.hashes(prompt))
    await case.settle()
    await eventually(lambda: rebuilt(case) == +case.kv.held)
    announced = {hashing.ROOT, hashing.seed("", "tenant-a"), hashing.seed("", "tenant-b")}
    for parent, block in stored_blocks(list(case.engine.held_blocks())):
        assert parent in announced
        announced.add(block)


@check("generate", "kv_events", "clear_kv")
async def cleared_cache_is_empty_and_says_so(case: EngineCase) -> None:
    """Nothing is reused after it, and a reader of the events sees it with the next request at the latest."""
    old, new = case.prompt(3.5), case.prompt(2.5)
    await case.generate(old, max_tokens=2)
    await case.holds(case.hashes(old))
    await case.settle()
    before = len(case.kv.events)
    await case.engine.clear_kv()
    await case.generate(new, max_tokens=2)
    await case.holds(case.hashes(new))
    assert any(isinstance(event, BlocksCleared) for event in case.kv.events[before:])
    expected = {(0, 0, number): 1 for number in case.hashes(new).tolist()}
    await eventually(lambda: +case.kv.held == expected)
    await eventually(lambda: rebuilt(case) == expected)
    assert (await case.generate(old, max_tokens=2)).cached_tokens == 0


def _check_small(case: EngineCase) -> None:
    if case.info.total_blocks > SMALL_BLOCKS_MAX:
        raise Inapplicable(f"its cache of {case.info.total_blocks} blocks is not filled in reasonable time")


@check("generate", "kv_events", "kv_dump", subject="new")
async def full_cache_evicts_and_says_what(make: MakeEngine) -> None:
    """More prompts than fit: removals are announced, the fold never contains more than there is, the newest stays."""
    async with started(make(small=True)) as case:
        _check_small(case)
        total, size = case.info.total_blocks, case.info.block_size
        blocks = min(total // 3, case.info.context_length // size - 2)
        prompts = [case.prompt(blocks + 0.5) for _ in range(total // blocks + 2)]
        for prompt in prompts:
            await case.generate(prompt, max_tokens=1)
            await case.holds(case.hashes(prompt))
            assert sum((+case.kv.held).values()) <= total
        assert not case.kv.holds(case.hashes(prompts[0]))
        await case.settle()
        await eventually(lambda: rebuilt(case) == +case.kv.held)
        assert (await case.generate(prompts[-1], max_tokens=1)).cached_tokens == blocks * size
        assert (await case.generate(prompts[0], max_tokens=1)).cached_tokens < blocks * size


@check("generate", "kv_events", "kv_dump", subject="new")
async def requests_that_do_not_fit_together_all_end(make: MakeEngine) -> None:
    """Running out of blocks delays requests and recomputes them; each gets its own length."""
    async with started(make(small=True)) as case:
        _check_small(case)
        prompts = [case.prompt(2.5) for _ in range(6)]
        length = case.info.total_blocks * case.info.block_size // 5 - len(prompts[0])
        alone = [(await case.generate(prompt, max_tokens=8, seed=3)).tokens for prompt in prompts]
        answers = [case.submit(case.request(prompt, max_tokens=length, seed=3)) for prompt in prompts]
        for answer in answers:
            await answer.ended(within_s=200)
        await case.idle()
        for answer, start in zip(answers, alone):
            assert [step.finish for step in answer.steps if step.finish] == ["length"]
            assert len(answer.tokens) == length
            # A real engine's sums depend a little on what else is in the batch.
            assert case.engine.name != "sim" or answer.tokens[:8] == start
        await case.settle()
        await eventually(lambda: rebuilt(case) == +case.kv.held)
