"""One fleet for all clients: two workers with the scripted engine."""

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from tests.clients import model
from tests.clients.answers import answers
from tests.support.engines import scripted
from tests.support.processes.fleet import FleetProcess, fleet

MODEL = "scripted"


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """The fleet."""
    folder = tmp_path_factory.mktemp("clients")
    made = model.make(folder / MODEL)
    script = folder / "answers.json"
    script.write_bytes(msgspec.json.encode(answers()))
    flags = ("--engine", "sim", "--model", str(made), "--sim-step-time", "zero", "--workers", "2")
    aliases = ("--model-aliases", "gpt-5-scripted,claude-opus-scripted")
    async with fleet(folder, *flags, *aliases, program=scripted.program(script)) as running:
        yield running
