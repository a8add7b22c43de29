"""The `Engine` contract on LoRA adapters: the shipped checks, and adapters as files."""

from pathlib import Path

import pytest

from headwater.engines.conformance import control
from headwater.engines.conformance.case import Check, checks_of
from headwater.engines.engine import EngineError, LoraAdapter, RequestRejected
from tests.support.engines import peft, tiny_model
from tests.support.ports.conformance import hold, parametrized
from tests.support.ports.engines import EngineCase

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
]

RANK = 4

LORA = [one for one in checks_of(control) if "lora" in one.needs]


def adapter(folder: Path, name: str, seed: int, rank: int = RANK) -> LoraAdapter:
    """An adapter for the small model."""
    return LoraAdapter(name, str(peft.make(folder / f"{name}-{seed}", tiny_model.ensure(), seed, rank)), rank)


@parametrized(LORA, "one")
async def test_lora(full_case: EngineCase, one: Check) -> None:
    await hold(one, full_case)


async def test_adapter_whose_files_are_missing_or_torn_leaves_nothing(
    full_case: EngineCase, tmp_path: Path
) -> None:
    """Told with what is wrong, and requests for it are refused."""
    if full_case.engine.name == "sim":
        pytest.skip("adapters are names here: there are no files")
    case = full_case
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(EngineError, match="adapter_config"):
        await case.engine.load_lora(LoraAdapter("empty", str(empty), RANK))
    torn = adapter(tmp_path, "torn", 3)
    Path(torn.folder, "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(EngineError, match="torn"):
        await case.engine.load_lora(torn)
    await case.engine.check()
    for name in ("empty", "torn"):
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
