"""It answers with its options."""

from collections.abc import AsyncIterator

from tokenizers import Tokenizer

from headwater.engines.custom import EngineInfo, EngineRequest, EngineSetup


class River:
    """See the package."""

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Encode the answer."""
        text = "from {source} past {stones} stones to {mouth}".format(**setup.options)
        self._answer = Tokenizer.from_buffer(setup.files.tokenizer).encode(text).ids
        return setup.info()

    async def generate(self, request: EngineRequest) -> AsyncIterator[list[int]]:
        """All of it at once."""
        yield self._answer
