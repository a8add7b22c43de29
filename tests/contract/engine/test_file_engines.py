"""One suite over the engines that generate files: diffusers' pipelines, and SGLang's diffusion server.

SGLang's is a double in each run (`tests/support/engines/diffusion/sglang_double.py`), and the real one, with
a video pipeline on a CPU, in the long form.
"""

import asyncio
import io
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from headwater.engines.diffusers.engine import DiffusersEngine
from headwater.engines.diffusers.pipelines import DiffusersOptions
from headwater.engines.engine import (
    Engine,
    EngineDied,
    EngineError,
    EngineStartFailed,
    EngineUnavailable,
    FileStep,
    NotSupported,
    RequestRejected,
)
from headwater.engines.sglang_diffusion.engine import SglangDiffusionEngine, SglangDiffusionOptions
from headwater.schemas.inference import FINAL, FileRequest, ImageRequest, VideoRequest
from headwater.schemas.media import PromptMedia
from tests.support.engines.diffusion import sglang_double, tiny_image_pipeline, tiny_video_pipeline
from tests.support.marks import VLLM
from tests.support.sglang.diffusion import INSTALLED, SERVER_ARGUMENTS, python_on_cpu

pytestmark = [*VLLM, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

IMAGE = ImageRequest("r", "a red fox", 64, 64, steps=3, seed=11)
VIDEO = VideoRequest("r", "a red fox", 64, 64, frames=5, fps=8, steps=3, seed=11)
SOURCE = PromptMedia("image", "source", 0, 0, (96, 128, 3), bytes(range(256)) * 144)
EDIT = msgspec.structs.replace(IMAGE, images=(SOURCE,))
LONG = 150
"""Steps of a request that is cancelled."""

Make = Callable[[Path], Awaitable[Engine]]


def python_of_double(folder: Path) -> Path:
    """What runs the double in the place of SGLang."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{sglang_double.__file__}" "$@"\n')
    python.chmod(0o700)
    return python


def double(folder: Path, task: str, *more: str) -> SglangDiffusionEngine:
    """The adapter with the double."""
    python = python_of_double(folder)
    options = SglangDiffusionOptions(python=str(python), args=("--task", task, *more), start_s=60.0)
    return SglangDiffusionEngine("a-model", "tiny", 512, options)


def real(folder: Path, model: Path, *arguments: str) -> SglangDiffusionEngine:
    """The adapter with SGLang itself."""
    if not INSTALLED:
        pytest.skip("`make sglang sglang-diffusion` installs it")
    python = python_on_cpu(folder)
    options = SglangDiffusionOptions(python=str(python), args=(*SERVER_ARGUMENTS, *arguments), start_s=240.0)
    return SglangDiffusionEngine(str(model), "tiny", 512, options)


async def diffusers_of(folder: Path, pipeline: Callable[[Path], Path]) -> Engine:
    """A real pipeline."""
    model = await asyncio.to_thread(pipeline, folder / "tiny")
    return DiffusersEngine(model, "tiny", 512, DiffusersOptions(device="cpu", threads=1))


async def _diffusers_images(folder: Path) -> Engine:
    return await diffusers_of(folder, tiny_image_pipeline.make)


async def _diffusers_video(folder: Path) -> Engine:
    return await diffusers_of(folder, tiny_video_pipeline.make)


async def _double_images(folder: Path) -> Engine:
    return double(folder, "T2I")


async def _double_video(folder: Path) -> Engine:
    return double(folder, "T2V")


async def _double_edits(folder: Path) -> Engine:
    return double(folder, "I2I")


async def _double_both(folder: Path) -> Engine:
    return double(folder, "TI2I")


async def _sglang_video(folder: Path) -> Engine:
    model = await asyncio.to_thread(tiny_video_pipeline.make, folder / "tiny")
    return real(folder, model, "--backend", "sglang", "--model-id", "Wan2.1-T2V-1.3B-Diffusers")


ENGINES: list[object] = [
    pytest.param((_diffusers_images, IMAGE), id="diffusers images"),
    pytest.param((_diffusers_video, VIDEO), id="diffusers video"),
    pytest.param((_double_images, IMAGE), id="double images"),
    pytest.param((_diffusers_images, EDIT), id="diffusers edits"),
    pytest.param((_double_edits, EDIT), id="double edits", marks=pytest.mark.soak),
    pytest.param((_double_both, EDIT), id="double images and edits"),
    pytest.param((_double_video, VIDEO), id="double video"),
    pytest.param((_sglang_video, VIDEO), id="sglang video", marks=pytest.mark.soak),
]


class Case:
    """A started engine, and what it is asked for."""

    def __init__(self, engine: Engine, order: FileRequest) -> None:
        self.engine = engine
        self.order = order

    async def run(self, emitted: list[FileStep] | None = None, **changes: object) -> list[bytes]:
        """The files of the order with changes."""
        steps: list[FileStep] = [] if emitted is None else emitted
        order: FileRequest = msgspec.structs.replace(self.order, **changes)
        if isinstance(order, ImageRequest):
            await self.engine.generate_images(order, steps.append)
        else:
            await self.engine.generate_video(order, steps.append)
        # What threads emitted is called in the next turn of the loop.
        await asyncio.sleep(0)
        return [step.data for step in steps if step.data and step.preview == FINAL]

    async def idle(self) -> None:
        """Until nothing runs."""
        async with asyncio.timeout(60):
            while self.engine.load().running or self.engine.load().waiting:
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Case]:
    """One engine for all tests."""
    make, order = request.param
    engine: Engine = await make(tmp_path_factory.mktemp("engine"))
    try:
        info = await engine.start()
        support = info.image_generation if isinstance(order, ImageRequest) else info.video_generation
        assert support is not None
        assert info.version
        yield Case(engine, order)
    finally:
        await engine.stop()


async def test_the_same_seed_is_the_same_file(case: Case) -> None:
    """Another seed, another prompt: another file. The last step has it."""
    steps: list[FileStep] = []
    [file] = await case.run(steps)
    assert (steps[-1].number, steps[-1].steps_done, steps[-1].data) == (0, 3, file)
    done = [step.steps_done for step in steps]
    assert done == sorted(done)
    assert await case.run() == [file]
    assert await case.run(seed=12) != [file]
    assert await case.run(prompt="a blue owl") != [file]
    assert await case.run(seed=2**63 - 1, guidance=3.0)


async def test_of_several_images_only_the_missing_ones_are_generated(case: Case) -> None:
    """Each with the noise that it has among all."""
    if isinstance(case.order, VideoRequest):
        pytest.skip("a request has one video")
    steps: list[FileStep] = []
    every = await case.run(steps, count=3)
    assert [step.number for step in steps if step.data] == [0, 1, 2]
    assert len(set(every)) == 3
    assert await case.run(count=3, first=1) == every[1:]
    assert await case.run(seed=case.order.seed + 2) == every[2:]


def is_edit(order: FileRequest) -> bool:
    """Does it change an image?"""
    return isinstance(order, ImageRequest) and bool(order.images)


async def test_another_image_is_another_result(case: Case) -> None:
    """Of any size; an engine that also generates makes another image of the prompt alone. One that cannot says so."""
    if not is_edit(case.order):
        pytest.skip("it changes no images")
    one = await case.run()
    grey = msgspec.structs.replace(SOURCE, shape=(64, 64, 3), data=b"\x80" * (64 * 64 * 3))
    assert await case.run(images=(grey,)) != one
    if "image_generation" in case.engine.capabilities:
        assert await case.run(images=()) != one
    else:
        with pytest.raises(NotSupported, match="image_generation"):
            await case.run(images=())
    with pytest.raises(RequestRejected, match="came with 0"):
        await case.run(images=(msgspec.structs.replace(SOURCE, data=b""),))


async def test_a_mask_and_a_strength_are_honoured_or_refused(case: Case) -> None:
    """What is not masked has the pixels that it had; a strength without a step is refused."""
    if not is_edit(case.order):
        pytest.skip("it changes no images")
    left = bytes([255] * 64 + [0] * 64) * 96
    mask = PromptMedia("image", "mask", 0, 0, (96, 128, 1), left)
    if isinstance(case.engine, SglangDiffusionEngine):
        for changes in ({"mask": mask}, {"strength": 0.5}):
            with pytest.raises(RequestRejected, match="SGLang takes no"):
                await case.run(**changes)
        return
    [file] = await case.run(mask=mask)
    with Image.open(io.BytesIO(file)) as opened:
        result = np.asarray(opened)
    whole = Image.frombytes("RGB", (128, 96), SOURCE.data).resize((64, 64), Image.Resampling.LANCZOS)
    before = np.asarray(whole)
    assert np.array_equal(result[:, 32:], before[:, 32:])
    assert (result[:, :32] != before[:, :32]).mean() > 0.9
    weak, strong = [
        np.asarray(Image.open(io.BytesIO((await case.run(steps=20, strength=s))[0]))) for s in (0.1, 1.0)
    ]
    assert not np.array_equal(weak, strong)
    with pytest.raises(RequestRejected, match="less than one step") as raised:
        await case.run(strength=0.1)
    assert raised.value.param == "strength"


async def test_the_other_kind_is_refused(case: Case) -> None:
    """By the name of the capability that is missing."""
    image = isinstance(case.order, ImageRequest)
    other = case.engine.generate_video(VIDEO, print) if image else case.engine.generate_images(IMAGE, print)
    with pytest.raises(NotSupported, match="video_generation" if image else "image_generation"):
        await other


async def test_a_cancelled_request_is_quiet_and_leaves_its_turn(case: Case) -> None:
    """It ends at once for who waits; the engine has nothing left to do soon after, and works."""
    steps: list[FileStep] = []
    work = asyncio.ensure_future(case.run(steps, steps=LONG))
    waits = asyncio.ensure_future(case.run(steps=LONG))
    while not case.engine.load().waiting:
        await asyncio.sleep(0.01)
    assert case.engine.load().running == 1
    for one in (waits, work):
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
    seen = len(steps)
    await case.idle()
    assert not any(step.data for step in steps)
    assert len(steps) - seen <= 1
    assert len(await case.run()) == 1


async def test_lower_numbers_are_served_first(case: Case) -> None:
    """Of those that wait, and then in the order in which they came."""
    order: list[int] = []

    async def one(name: int, priority: int) -> None:
        await case.run(priority=priority)
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for name, priority in enumerate((0, 5, 5, -1)):
            group.create_task(one(name, priority))
            await asyncio.sleep(0)
    assert order == [0, 3, 1, 2]
    assert case.engine.load()[:2] == (0, 0)


async def died(engine: Engine) -> None:
    """Check the engine until that raises."""
    async with asyncio.timeout(20):
        while True:
            await engine.check()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("task", ["T2I", "T2V"])
async def test_failures_of_sglangs_server(tmp_path: Path, task: str) -> None:
    """What it rejects, where it fails, and its death: each by its own error; its files go with it."""
    engine = double(tmp_path, task)
    case = Case(engine, IMAGE if task == "T2I" else VIDEO)
    await engine.start()
    with pytest.raises(RequestRejected, match="the prompt is not accepted"):
        await case.run(prompt="reject")
    with pytest.raises(RequestRejected, match="size 65x64 is not supported"):
        await case.run(width=65)
    with pytest.raises(EngineError, match="out of memory"):
        await case.run(prompt="fail")
    assert await case.run()
    await engine.check()
    folder = engine._server.folder
    assert [*(folder / "outputs").iterdir()] == []
    with pytest.raises(EngineError):
        await case.run(prompt="die")
    with pytest.raises(EngineDied, match="exit code 9"):
        await died(engine)
    await engine.stop()
    assert not folder.exists()


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """And is not started again."""
    broken = double(tmp_path, "broken")
    with pytest.raises(EngineStartFailed, match="the model cannot be loaded"):
        await broken.start()
    await broken.stop()
    both = double(tmp_path, "TI2I")
    await both.start()
    await both.generate_images(EDIT, lambda _: None)
    assert [*(both._server.folder / "inputs").iterdir()] == []
    await both.stop()
    other = double(tmp_path, "I2V")
    with pytest.raises(EngineUnavailable, match="its tasks: I2V"):
        await other.start()
    await other.stop()
    old = double(tmp_path, "T2V", "--version", "0.5.9")
    with pytest.raises(EngineUnavailable, match=r"CVE-2026-3059.*install 0\.5\.10 or newer"):
        await old.start()
    await old.stop()
    nowhere = SglangDiffusionEngine("m", "m", 512, SglangDiffusionOptions(python=str(tmp_path / "nowhere")))
    with pytest.raises(EngineUnavailable, match="option python"):
        await nowhere.start()
    await nowhere.stop()


WORKER = """
import asyncio, sys
from headwater.engines.sglang_diffusion.engine import SglangDiffusionEngine
from headwater.engines.sglang_diffusion.engine import SglangDiffusionOptions

async def main():
    engine = SglangDiffusionEngine("m", "m", 512, SglangDiffusionOptions(python=sys.argv[1]))
    await engine.start()
    print(engine._server.folder, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the death of a parent")
async def test_a_worker_that_is_killed_takes_its_server_along(tmp_path: Path) -> None:
    """Which removes its files when it ends."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, str(python_of_double(tmp_path)), stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    folder = Path((await worker.stdout.readline()).decode().strip())
    assert folder.is_dir()
    worker.kill()
    await worker.wait()
    async with asyncio.timeout(30):
        while folder.exists():
            await asyncio.sleep(0.02)
