"""Checks of LoRA adapters: answers and cached blocks of their own, slots, and what is rejected.

Without adapters as files the engine gets names only. One that reads files rejects those: give it two adapters.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headwater.engines.conformance.case import EngineCase, Inapplicable
from headwater.engines.conformance.check import check, raises
from headwater.engines.engine import EngineError, RequestRejected

SLOTS_MIN = 2


@asynccontextmanager
async def _loaded(case: EngineCase, *names: str) -> AsyncIterator[None]:
    """Adapters under these names, each with weights of its own; unloaded at the end."""
    if case.info.lora_slots < SLOTS_MIN:
        raise Inapplicable(f"it has {case.info.lora_slots} LoRA slots, the check needs {SLOTS_MIN}")
    try:
        for number, name in enumerate(names):
            try:
                await case.engine.load_lora(case.adapter(name, number))
            except EngineError as error:
                if case.has_adapter_files:
                    raise
                raise Inapplicable(f"it loads no adapter without files: {error}") from error
        yield
    finally:
        for name in names:
            await case.engine.unload_lora(name)


@check("generate", "lora")
async def adapters_answer_each_in_its_own_way(case: EngineCase) -> None:
    """Other tokens than each other and the base model; an unloaded one is rejected, and loading twice is fine."""
    names = ("north", "south")
    async with _loaded(case, *names):
        for number, name in enumerate(names):
            await case.engine.load_lora(case.adapter(name, number))
        prompt = case.prompt(2.5)
        answers = [(await case.generate(prompt, lora=name, seed=5)).tokens for name in ("", *names)]
        assert len({tuple(tokens) for tokens in answers}) == 3, "two of them answer in the same way"
        for name, tokens in zip(("", *names), answers, strict=True):
            assert (await case.generate(prompt, lora=name, seed=5)).tokens == tokens
        await case.engine.unload_lora("north")
        with raises(RequestRejected, "south"):
            case.submit(case.request(prompt, lora="north"))
        assert (await case.generate(prompt, lora="south", seed=5)).tokens == answers[2]
    assert (await case.generate(prompt, seed=5)).tokens == answers[0]


@check("generate", "lora", "kv_events")
async def adapters_share_no_blocks(case: EngineCase) -> None:
    """The same prompt is computed once per adapter, and its blocks have names of their own."""
    names, size = ("north", "south"), case.info.block_size
    async with _loaded(case, *names):
        prompt = case.prompt(2.5)
        for name in ("", *names):
            assert (await case.generate(prompt, lora=name)).cached_tokens == 0
            await case.holds(case.hashes(prompt, lora=name))
            assert (await case.generate(prompt, lora=name)).cached_tokens == 2 * size


@check("generate", "lora")
async def adapters_run_side_by_side(case: EngineCase) -> None:
    """Requests of both and of the base model at once answer as alone."""
    names = ("east", "west")
    async with _loaded(case, *names):
        prompt = case.prompt(1.5)
        every = ("", *names)
        alone = [(await case.generate(prompt, lora=name, seed=5)).tokens for name in every]
        answers = [case.submit(case.request(prompt, lora=name, seed=5)) for name in every]
        for answer, expected in zip(answers, alone, strict=True):
            assert (await answer.ended()).tokens == expected
        await case.idle()


@check("generate", "lora")
async def adapter_that_cannot_be_loaded_leaves_nothing(case: EngineCase) -> None:
    """Too large a rank, no free slot: an error that says so, and requests for it are rejected."""
    with raises(EngineError, "rank"):
        await case.engine.load_lora(case.adapter("wide", 1, 2 * case.info.lora_rank_max))
    taken = [f"slot-{number}" for number in range(case.info.lora_slots)]
    async with _loaded(case, *taken):
        with raises(EngineError, "slot-0"):
            await case.engine.load_lora(case.adapter("late", 9))
    for name in ("wide", "late"):
        with raises(RequestRejected, "loaded"):
            case.submit(case.request(case.prompt(1), lora=name))


CHECKS = (
    adapters_answer_each_in_its_own_way,
    adapters_share_no_blocks,
    adapters_run_side_by_side,
    adapter_that_cannot_be_loaded_leaves_nothing,
)
