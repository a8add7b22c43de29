"""A fleet with a script, a recorder before it, a folder with the program, and an agent that works there."""

import asyncio
import contextlib
import os
import signal
import subprocess
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from PIL import Image

from tests.agents import task
from tests.agents.agents import CUT_OFF, PICTURE, environment
from tests.agents.recorder import Recorder
from tests.clients import model
from tests.support.engines import scripted
from tests.support.engines.scripted import Answer
from tests.support.processes.fleet import FleetProcess, fleet

CONTEXT: Final = 400_000
"""The model has a token for each byte, and Claude Code's first prompt 115,000."""

WITHIN_S: Final = 300
PATIENT_S: Final = 3_600
"""Of an agent whose model is slow."""


class Stage(NamedTuple):
    """See the module."""

    up: FleetProcess
    recorder: Recorder
    work: Path
    environment: dict[str, str]
    within_s: float = WITHIN_S

    async def start(self, *command: str, stdin: int = DEVNULL) -> asyncio.subprocess.Process:
        """Start an agent in a process group of its own."""
        return await asyncio.create_subprocess_exec(
            *command,
            cwd=self.work,
            env=self.environment,
            stdin=stdin,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
        )

    async def run(self, *command: str, messages: tuple[str, ...] = ()) -> str:
        """Run an agent until it ends, with `messages` on its standard input; returns what it printed."""
        process = await self.start(*command, stdin=PIPE if messages else DEVNULL)
        typed = "".join(f"{one}\n" for one in messages).encode() or None
        try:
            async with asyncio.timeout(self.within_s):
                output, _ = await process.communicate(typed)
        finally:
            end(process)
        text = output.decode(errors="replace")
        assert process.returncode == 0 or CUT_OFF in text, f"{text[-3000:]}\n{self.recorder.summary()}"
        return text

    def check(self, text: str) -> None:
        """The agent has said the last word of the script, and the program is right."""
        seen = f"{text[-3000:]}\n{self.recorder.summary()}"
        assert task.DONE in " ".join(text.split()), seen
        assert (self.work / "add.py").read_text() == task.MENDED, seen

    async def metric(self, name: str, holds: Callable[[str], bool] = lambda _: True) -> float:
        """The sum of a metric of the edge over the series whose labels satisfy `holds`."""
        async with self.up.client() as client:
            lines = (await client.get("/metrics")).text.splitlines()
        found = [line for line in lines if line.startswith(f"{name}{{") and holds(line)]
        return sum(float(line.rpartition(" ")[2]) for line in found)


def end(process: asyncio.subprocess.Process) -> None:
    """End an agent and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@asynccontextmanager
async def stage(
    folder: Path, models: str, answers: list[Answer], step_time: str = "zero", **settings: Any
) -> AsyncIterator[Stage]:
    """A stage with the scripted engine. `settings` are those of `environment`."""
    script = folder / "answers.json"
    script.write_bytes(msgspec.json.encode(answers))
    made = model.make(folder / "model", context=CONTEXT)
    flags: tuple[str, ...] = (
        "--engine",
        "sim",
        "--model",
        str(made),
        "--sim-step-time",
        step_time,
        "--sim-blocks",
        "100000",
    )
    flags += ("--workers", "1", "--model-aliases", models, "--record-payloads", "full")
    async with (
        fleet(folder, *flags, program=scripted.program(script)) as up,
        staged(folder, up, **settings) as made_stage,
    ):
        yield made_stage


@asynccontextmanager
async def staged(
    folder: Path, up: FleetProcess, *, patient: bool = False, **settings: Any
) -> AsyncIterator[Stage]:
    """The rest of a stage, before any fleet. At the end every request for an answer has had one, but for those that the recorder refused."""
    work, home = folder / "work", folder / "home"
    task.write(work)
    Image.new("RGB", task.SIZE, (200, 30, 30)).save(work / PICTURE)
    home.mkdir()
    await asyncio.to_thread(_commit, work)
    recorder = Recorder(up.url)
    async with recorder.running():
        found = environment(home, recorder.url, patient=patient, **settings)
        yield Stage(up, recorder, work, found, PATIENT_S if patient else WITHIN_S)
        assert not recorder.refused, recorder.refused


def _commit(work: Path) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for arguments in (("init", "--quiet"), ("add", "."), (*identity, "commit", "--quiet", "-m", "The start")):
        subprocess.run(("git", *arguments), cwd=work, check=True)
