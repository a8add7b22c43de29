"""The double in processes of a fleet: its instances meet through files, as the real ones do over a network.

`FOLDER` names the folder in the environment.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

import msgspec

from headwater.engines.engine import Transfer
from headwater.engines.sim import StepTime
from tests.support.tensorrt_llm.double import World, modules_of

FOLDER: Final = "TEST_TENSORRT_LLM_MEETINGS"
SITE: Final = Path(__file__).parent / "site"
POLL_S: Final = 0.02


class FileMeetings:
    """Futures by number, each set by whichever process has its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tasks: set[asyncio.Task[None]] = set()

    def setdefault(self, number: int, future: "asyncio.Future[Transfer]") -> "asyncio.Future[Transfer]":
        """The future for this number, with a task that sets it from the file, or writes the file from it."""
        task = asyncio.ensure_future(self._connect(self._folder / str(number), future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future

    async def _connect(self, path: Path, future: "asyncio.Future[Transfer]") -> None:
        while not future.done():
            if path.exists():
                future.set_result(msgspec.msgpack.decode(path.read_bytes(), type=Transfer))
                return
            await asyncio.sleep(POLL_S)
        if not path.exists():
            new = path.with_suffix(".new")
            new.write_bytes(msgspec.msgpack.encode(future.result()))
            new.replace(path)


def install(name: str) -> None:
    """Make the package `name` that is being imported, and its modules, the double."""
    world = World(step_time=StepTime(), script=tuple(range(300, 400)))
    # Apart from each other, engines check only that parameters name their prompt.
    world.fabric = None  # type: ignore[assignment]
    world.meetings = FileMeetings(Path(os.environ[FOLDER]))  # type: ignore[assignment]
    for module, made in modules_of(world).items():
        if module == name:
            vars(sys.modules[name]).update(
                {key: value for key, value in vars(made).items() if key[:2] != "__"}
            )
            sys.modules[name].__version__ = made.__version__  # type: ignore[attr-defined]
        else:
            sys.modules[module] = made
