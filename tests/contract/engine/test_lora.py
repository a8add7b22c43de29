"""The `Engine` contract on LoRA adapters: answers and cached blocks of their own, and what is refused."""

from pathlib import Path

import pytest

from headwater.engines.engine import EngineError, LoraAdapter, RequestRejected
from tests.support.engines import peft, tiny_model
from tests.support.ports.engines import EngineCase

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]

RANK = 4


def adapter(folder: Path, name: str, seed: int, rank: int = RANK) -> LoraAdapter:
    """An adapter for the small model."""
    return LoraAdapter(name, str(peft.make(folder / f"{name}-{seed}", tiny_model.ensure(), seed, rank)), rank)


async def test_adapters_answer_each_in_its_own_way(full_case: EngineCase, tmp_path: Path) -> None:
    """Different tokens from each other and from the base; none reuses a block of another; unloaded is gone."""
    case, size = full_case, full_case.info.block_size
    names = ("north", "south")
    for number, name in enumerate(names):
        made = adapter(tmp_path, name, number)
        await case.engine.load_lora(made)
        await case.engine.load_lora(made)
    prompt = case.prompt(2.5)
    answers: list[tuple[int, ...]] = []
    for name in ("", *names):
        answer = await case.generate(prompt, lora=name, seed=5)
        assert answer.cached_tokens == 0
        await case.holds(case.hashes(prompt, lora=name))
        again = await case.generate(prompt, lora=name, seed=5)
        assert (again.tokens, again.cached_tokens) == (answer.tokens, 2 * size)
        answers.append(tuple(answer.tokens))
    assert len(set(answers)) == 3
    assert len({case.hashes(prompt, lora=name)[0] for name in ("", *names)}) == 3
    await case.engine.unload_lora("north")
    with pytest.raises(RequestRejected, match="south"):
        case.submit(case.request(prompt, lora="north"))
    assert tuple((await case.generate(prompt, lora="south", seed=5)).tokens) == answers[2]
    await case.engine.unload_lora("south")
    await case.engine.unload_lora("south")
    assert tuple((await case.generate(prompt, seed=5)).tokens) == answers[0]


async def test_adapters_run_side_by_side(full_case: EngineCase, tmp_path: Path) -> None:
    """Requests of both and of the base in one batch answer as alone: none gets another's adapter."""
    case = full_case
    names = ("", "east", "west")
    for number, name in enumerate(names[1:], 10):
        await case.engine.load_lora(adapter(tmp_path, name, number))
    prompt = case.prompt(1.5)
    alone = [(await case.generate(prompt, lora=name, seed=5)).tokens for name in names]
    answers = [case.submit(case.request(prompt, lora=name, seed=5)) for name in names]
    for answer, expected in zip(answers, alone, strict=True):
        assert (await answer.ended()).tokens == expected
    await case.idle()
    for name in names[1:]:
        await case.engine.unload_lora(name)


async def test_adapter_that_can_not_be_loaded_leaves_nothing(full_case: EngineCase, tmp_path: Path) -> None:
    """Too large a rank, no free slot: told with what to do, and requests for it are refused."""
    case = full_case
    with pytest.raises(EngineError, match="rank"):
        await case.engine.load_lora(adapter(tmp_path, "wide", 1, 2 * case.info.lora_rank_max))
    taken = [f"slot-{number}" for number in range(case.info.lora_slots)]
    for number, name in enumerate(taken):
        await case.engine.load_lora(adapter(tmp_path, name, number))
    with pytest.raises(EngineError, match="slot-0"):
        await case.engine.load_lora(adapter(tmp_path, "late", 9))
    for name in taken:
        await case.engine.unload_lora(name)
    if case.engine.name != "sim":
        empty = tmp_path / "empty"
        empty.mkdir()
        with pytest.raises(EngineError, match="adapter_config"):
            await case.engine.load_lora(LoraAdapter("empty", str(empty), RANK))
        torn = adapter(tmp_path, "torn", 3)
        Path(torn.folder, "adapter_model.safetensors").write_bytes(b"torn")
        with pytest.raises(EngineError, match="torn"):
            await case.engine.load_lora(torn)
        await case.engine.check()
    for name in ("wide", "late", "empty", "torn"):
        with pytest.raises(RequestRejected, match="loaded"):
            case.submit(case.request(case.prompt(1), lora=name))


async def test_other_weights_under_the_same_name_find_no_old_blocks(
    full_case: EngineCase, tmp_path: Path
) -> None:
    """The engine knows blocks by the adapter's name: those of the earlier weights are dropped."""
    if full_case.engine.name == "sim":
        pytest.skip("adapters are names here: there are no other weights")
    case, prompt = full_case, full_case.prompt(2.5)
    answers: list[list[int]] = []
    for seed in (1, 2):
        made = adapter(tmp_path, "same", seed)
        await case.engine.load_lora(made)
        answer = await case.generate(prompt, lora="same")
        assert answer.cached_tokens == 0
        answers.append(answer.tokens)
        if seed == 1:
            with pytest.raises(EngineError, match="unload it first"):
                await case.engine.load_lora(adapter(tmp_path, "same", 2))
        await case.engine.unload_lora("same")
    assert answers[0] != answers[1]
