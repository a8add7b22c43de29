"""One fleet for the tests of this folder whose requests need no flags of their own."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.clients.requests import BODY_S, HEADER_S
from tests.support.processes.fleet import FleetProcess, fleet


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """Two simulated workers behind an edge with short timeouts."""
    flags = ("--engine", "sim", "--header-timeout-s", str(HEADER_S), "--body-timeout-s", str(BODY_S))
    async with fleet(tmp_path_factory.mktemp("clients"), *flags) as made:
        yield made
