"""Sleep of vLLM: a level that this release cannot leave is refused before anything is released."""

from typing import Any

import pytest

from headwater.engines.engine import EngineDied, EngineError
from headwater.engines.vllm import VllmOptions, config
from headwater.engines.vllm.engine import VllmEngine
from headwater.engines.vllm.operations import Loras
from tests.support.engines.settings import engine_settings


class Library:
    """AsyncLLM's sleep. `calls`: what was asked of it; `fails`: what raises."""

    errored, is_running = False, True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = ""

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if what == self.fails:
            raise RuntimeError("KeyError: 'layers.0.self_attn.qkv_proj.weight'")

    async def sleep(self, level: int) -> None:
        """See AsyncLLM."""
        self._call(f"sleep {level}")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """See AsyncLLM."""
        self._call(f"wake {' '.join(tags or ())}".strip())

    async def collective_rpc(self, method: str, **_: Any) -> None:
        """See AsyncLLM."""
        self._call(method)


def engine(monkeypatch: pytest.MonkeyPatch, version: str, slots: int) -> tuple[VllmEngine, Library]:
    """An engine of this release that is awake, with so many places for adapters."""
    monkeypatch.setattr(config, "installed", lambda: version)
    made, library = VllmEngine(engine_settings(VllmOptions(), "/models/small")), Library()
    made._engine = library
    made.capabilities = frozenset({"sleep", "lora"} if slots else {"sleep"})
    made._loras = Loras(library, slots, 8, made.clear_kv)
    return made, library


async def test_weights_that_cannot_be_read_again_are_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM 0.24 does not find the weights of layers with adapters again; level 1 keeps them."""
    made, library = engine(monkeypatch, "0.24.0", slots=2)
    with pytest.raises(EngineError, match=r"level 2.*LoRA.*level 1"):
        await made.sleep(2)
    assert library.calls == []
    await made.sleep(1)
    await made.wake()
    assert library.calls == ["sleep 1", "wake"]


@pytest.mark.parametrize(("version", "slots"), [("0.24.0", 0), ("0.32.0", 2), ("0.33.0", 2)])
async def test_level_2_is_there_without_adapters_and_in_later_releases(
    monkeypatch: pytest.MonkeyPatch, version: str, slots: int
) -> None:
    made, library = engine(monkeypatch, version, slots)
    await made.sleep(2)
    await made.wake()
    assert library.calls == ["sleep 2", "wake weights", "reload_weights", "wake kv_cache"]


@pytest.mark.parametrize("step", ["wake weights", "reload_weights", "wake kv_cache"])
async def test_a_wake_that_fails_is_a_death(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Whatever part of it: with half its weights it must not answer. It says so from then on."""
    made, library = engine(monkeypatch, "0.32.0", slots=0)
    await made.sleep(2)
    library.fails = step
    with pytest.raises(EngineDied, match="qkv_proj"):
        await made.wake()
