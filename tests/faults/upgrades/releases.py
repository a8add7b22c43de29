"""Builds of Headwater from two commits, each installed in a folder of its own, and processes that run either."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from headwater.ops.start.children import child_environment

ROOT = Path(__file__).resolve().parents[3]

BEFORE = "463ffea610dd7fecb1fff6ddef9f68a2ef29f684"
"""The commit that stands for the release before: the last one without revisions and traffic splits. Until there is a release."""

STOP_S = 60.0
RESTART_S = 0.2


class Release(NamedTuple):
    """An installed build. Without a `folder` it is the one that runs the tests."""

    name: str
    folder: Path | None = None

    def environment(self) -> dict[str, str]:
        """Variables with which Python imports this build."""
        found = child_environment()
        if self.folder is not None:
            found["PYTHONPATH"] = str(self.folder)
        return found


def missing() -> str:
    """Why the build of the commit before cannot be made here, or ""."""
    found = subprocess.run(
        ["git", "cat-file", "-e", f"{BEFORE}^{{commit}}"], cwd=ROOT, capture_output=True, check=False
    )
    return "" if found.returncode == 0 else f"this is no clone that has the commit {BEFORE[:12]}"


def build(commit: str, folder: Path) -> Release:
    """Make a wheel of a commit, as a release does, and install it without what it depends on."""
    source, site = folder / "source", folder / "site"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=source, input=archive, check=True)
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "build", "--quiet", "--wheel", "--out-dir", folder], cwd=source, check=True)
    [wheel] = folder.glob("*.whl")
    install = [*uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
    subprocess.run([*install, "--target", site, wheel], check=True)
    place = "import headwater; print(headwater.__file__)"
    made = Release(commit[:8], site)
    told = subprocess.run(
        [sys.executable, "-c", place], env=made.environment(), capture_output=True, text=True, check=True
    )
    assert told.stdout.startswith(str(site)), told.stdout
    # Else each process of the fleet would compile the kernels, at once.
    warm = [sys.executable, "-m", "headwater.ops.cli", "warm"]
    subprocess.run(warm, env=made.environment(), cwd=folder, capture_output=True, check=True)
    return made


class Process:
    """One process, started again whenever it ends, of the release that is chosen at the time."""

    def __init__(self, release: Release, log: Path, arguments: list[str]) -> None:
        self.release = release
        self.lives = 0
        self._log = log
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while not self._stopping:
            with self._log.open("ab") as output:
                self._process = await start(self.release, *self._arguments, output=output)
            self.lives += 1
            await self._process.wait()
            if not self._stopping:
                await asyncio.sleep(RESTART_S)

    async def replace(self, release: Release) -> None:
        """SIGTERM, and the next life is of another release."""
        self.release, lives = release, self.lives
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_S):
            while self.lives == lives:
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End it."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            async with asyncio.timeout(STOP_S):
                await process.wait()
        self._task.cancel()


async def start(release: Release, *arguments: str, output: object) -> asyncio.subprocess.Process:
    """A command of a release."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "headwater.ops.cli"),
        *arguments,
        env=release.environment(),
        stdout=output,  # type: ignore[arg-type]
        stderr=asyncio.subprocess.STDOUT,
        cwd="/",
    )


async def run(release: Release, *arguments: str) -> tuple[int, str]:
    """Exit status and output of a command of a release."""
    process = await start(release, *arguments, output=asyncio.subprocess.PIPE)
    async with asyncio.timeout(STOP_S):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


@asynccontextmanager
async def running(
    release: Release, folder: Path, kind: str, name: str, *flags: str
) -> AsyncIterator[Process]:
    """A process of a fleet until the block ends."""
    line = [kind, "--name", name, "--log-format", "json", *flags]
    process = Process(release, folder / f"{name}.log", line)
    try:
        yield process
    finally:
        await process.stop()
