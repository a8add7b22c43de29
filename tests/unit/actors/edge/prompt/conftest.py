"""The process that decodes media for the tests of a module."""

from collections.abc import AsyncIterator

import pytest_asyncio

from headwater.actors.media.intake import MediaIntake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def intake() -> AsyncIterator[MediaIntake]:
    """For modules whose tests run in one loop: their `pytestmark` says so."""
    made = MediaIntake()
    yield made
    await made.close()
