"""An engine that answers with its prompt.

headwater up --engine examples/engines/echo.py
"""

from collections.abc import AsyncIterator

from headwater.engines.custom import EngineInfo, EngineRequest, EngineSetup


class Echo:
    """The two required methods."""

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Nothing to load: the sizes are those of the settings."""
        return setup.info()

    async def generate(self, request: EngineRequest) -> AsyncIterator[int]:
        """One token after the other, as many as requested at most."""
        for token in request.tokens:
            yield token
