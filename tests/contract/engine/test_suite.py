"""The suite of `headwater check-engine`: what the examples pass, and that it finds what is broken."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headwater.engines.conformance.suite import SUITE, ConformanceRun
from headwater.engines.custom import CustomEngine, EngineInfo, EngineRequest, EngineSetup, Output, Step
from headwater.engines.engine import Emit, Engine, KvEvent, PauseMode, Transfer
from headwater.engines.model_files import byte_model_files
from headwater.engines.process import BLOCKED_S
from headwater.engines.sim import StepTime
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.ops.commands.application import main
from headwater.schemas import hashing
from headwater.schemas.clock import SystemClock
from headwater.schemas.events import BlocksCleared, BlocksStored
from headwater.schemas.inference import EmbedRequest, GenerateRequest
from tests.support.engines import peft, tiny_model

pytestmark = pytest.mark.timeout(120)

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "engines"


@pytest.mark.parametrize(("example", "passes"), [("echo", 16), ("kv_events", 27), ("prefill_decode", 24)])
def test_examples_pass(example: str, passes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every check that their capabilities call for; the others are listed as unsupported with what they need."""
    assert main(["check-engine", str(EXAMPLES / f"{example}.py")]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SUITE)
    assert sum(line.startswith("pass ") for line in lines) == passes
    assert last.endswith(f"{passes} pass, {len(SUITE) - passes} unsupported")


def test_failure_names_the_line_and_is_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of an engine that dies: the checks after it get another one."""
    path = tmp_path / "short.py"
    path.write_text(
        "class Short:\n"
        "    async def start(self, setup): return setup.info()\n"
        "    async def generate(self, request):\n"
        "        if request.sampling.max_tokens == 7: raise KeyError('seven')\n"
        "        for token in request.tokens: yield token\n"
    )
    assert main(["check-engine", str(path)]) == 1
    out = capsys.readouterr().out
    [failed] = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert "length ends an answer" in failed
    assert "generation.py:" in failed
    assert "1 FAIL, 15 pass" in out


TUNED = """
from pathlib import Path

class Tuned:
    async def start(self, setup): return setup.info(lora_slots=3, lora_rank_max=8)
    async def generate(self, request):
        for token in request.tokens: yield token + self.loaded.get(request.lora_name, 0)
    loaded = {}
    async def load_lora(self, adapter):
        self.loaded[adapter.name] = (Path(adapter.folder) / "adapter_model.safetensors").read_bytes()[-1] % 20 + 1
    async def unload_lora(self, name): del self.loaded[name]
"""


def test_lora_checks_use_the_adapters_that_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without files they check an engine that reads none, and do not apply to one that does."""
    folders = [str(peft.make(tmp_path / f"a{seed}", tiny_model.ensure(), seed)) for seed in (1, 2)]
    given = [word for folder in folders for word in ("--lora-adapter", folder)]
    checks = ("adapters answer each", "adapters run side by side", "adapter that cannot be loaded")

    def checked(name: str, source: str, *flags: str) -> list[str]:
        path = tmp_path / name
        path.write_text(source)
        main(["check-engine", str(path), *flags])
        lines = capsys.readouterr().out.splitlines()
        found = [line for one in checks for line in lines if one in line]
        return [line.split("  ")[0] for line in found]

    assert checked("tuned.py", TUNED, *given) == ["pass"] * 3
    same = TUNED.replace("read_bytes()[-1] % 20 + 1", "read_bytes()[0]")
    assert checked("same.py", same, *given) == ["FAIL", "pass", "pass"]
    assert checked("bare.py", TUNED) == ["not applicable"] * 3


def test_lora_adapters_that_are_none_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, says in (((tmp_path,), "give two adapters"), ((tmp_path, tmp_path), "adapter_config.json")):
        line = ["check-engine", str(EXAMPLES / "echo.py"), *(f"--lora-adapter={one}" for one in given)]
        assert main(line) != 0
        assert says in capsys.readouterr().err


class Broken(SimEngine):
    """A simulated engine with one fault."""

    def __init__(self) -> None:
        settings = SimSettings(
            total_blocks=64, context_length=8_192, step_time=StepTime(), script=tuple(range(300, 400))
        )
        super().__init__(settings._replace(total_blocks=1024), SystemClock())


class EndsTwice(Broken):
    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        def twice(step: Step) -> None:
            emit(step)
            if step.finish == "length":
                emit(step)

        super().submit(request, twice, transfer)


class IgnoresAborts(Broken):
    def abort(self, request: str) -> None:
        pass


class AcceptsAnything(Broken):
    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        try:
            super().submit(request, emit, transfer)
        except Exception:
            asyncio.get_running_loop().call_soon(emit, Step((), "rejected"))


class AnnouncesOtherHashes(Broken):
    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        async for events in super().kv_events():
            yield [
                BlocksStored(one.parent, hashing.pack_hashes(hashing.unpack_hashes(one.hashes) + 1))
                if isinstance(one, BlocksStored)
                else one
                for one in events
            ]


class ClearsSilently(Broken):
    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        async for events in super().kv_events():
            yield [one for one in events if not isinstance(one, BlocksCleared)]


class ListsNothing(Broken):
    def held_blocks(self) -> list[BlocksStored]:
        return []


class PausesNothing(Broken):
    async def pause(self, mode: PauseMode) -> None:
        pass


class SleepsTwice(Broken):
    async def sleep(self, level: int) -> None:
        if not self._asleep:
            await super().sleep(level)


class SameVectors(Broken):
    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        found = await super().embed(request)
        return (found[0],) * len(found)


class SharesSalts(Broken):
    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        from msgspec.structs import replace

        super().submit(replace(request, cache_salt=""), emit, transfer)


class BlocksTheLoop(Broken):
    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        super().submit(request, emit, transfer)
        asyncio.get_running_loop().call_soon(time.sleep, 1.5 * BLOCKED_S)


class FetchesAnything(Broken):
    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        super().submit(request, emit, None)


@pytest.mark.parametrize(
    ("engine", "failures"),
    [
        (
            EndsTwice,
            {"length ends an answer with exactly one last step", "requests at once each get their own"},
        ),
        (IgnoresAborts, {"request aborted at once still gets its last step"}),
        (
            AcceptsAnything,
            {"request that can never work is rejected", "what an engine lacks is rejected by name"},
        ),
        (AnnouncesOtherHashes, {"prompt blocks are announced under the edges names"}),
        (ClearsSilently, {"cleared cache is empty and says so", "sleeping engine holds no blocks"}),
        (BlocksTheLoop, {"event loop stays free"}),
        (ListsNothing, {"held blocks rebuild what was announced"}),
        (PausesNothing, {"pause with mode abort", "pause with mode keep"}),
        (SleepsTwice, {"sleeping engine starts nothing and wakes"}),
        (SameVectors, {"vectors are those of the tokens"}),
        (SharesSalts, {"other salt shares nothing"}),
        (FetchesAnything, {"used handoff is rejected", "unusable handoff ends in an error"}),
    ],
)
async def test_suite_finds_what_is_broken(engine: type[Broken], failures: set[str]) -> None:
    """Each fault fails at least the checks that are about it."""
    about = tuple(one for one in SUITE if one.name in failures)
    assert len(about) == len(failures)
    run = ConformanceRun(
        lambda *, small=False: engine(), check_s_max=1.0 if engine is not BlocksTheLoop else 30.0
    )
    assert {one.name async for one in run.results(about) if one.outcome == "failed"} == failures


class Sleepy:
    """Every optional method of control, as an engine in one file defines them."""

    async def start(self, setup: EngineSetup) -> EngineInfo:
        self.calls: list[str] = []
        return setup.info(lora_slots=1, lora_rank_max=4)

    async def generate(self, request: EngineRequest) -> AsyncIterator[Output]:
        for number in range(request.sampling.max_tokens):
            await asyncio.sleep(0.0005)
            yield sum(request.tokens) % 200 + number % 5

    async def embed(self, request: Any) -> list[list[float]]:
        return [[float(sum(tokens)), 1.0] for tokens in request.prompts]

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    async def wake(self) -> None:
        self.calls.append("wake")

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")


async def test_control_of_an_engine_in_one_file_passes() -> None:
    """The rules around its methods are Headwater's."""
    engines: list[Sleepy] = []

    def make(*, small: bool = False) -> Engine:
        engines.append(Sleepy())
        return CustomEngine(
            "sleepy", engines[-1], EngineSetup("w0", "both", None, byte_model_files("sleepy"))
        )

    results = [one async for one in ConformanceRun(make).results()]
    assert [one for one in results if one.outcome == "failed"] == []
    passed = {one.name for one in results if one.outcome == "passed"}
    assert {f"pause with mode {mode}" for mode in ("abort", "wait", "keep")} < passed
    assert {"sleeping engine starts nothing and wakes", "vectors are those of the tokens"} < passed
    assert engines[0].calls == ["pause", "resume"] * 3 + ["sleep 1", "wake"]
