"""Everything that a worker's engine has to do, of whatever kind: how much it is, when it is over, and giving it up."""

import asyncio

from headwater.actors.embedding import Embedding
from headwater.actors.intake import Intake, Submits

PAUSE_S = 0.005


class Work:
    """Requests that generate, prompts that are pooled, and KV that is kept for other workers."""

    def __init__(self, engine: Submits, intake: Intake, embedding: Embedding) -> None:
        self._engine = engine
        self._intake = intake
        self._embedding = embedding

    def __len__(self) -> int:
        """Requests that the engine has."""
        return len(self._intake.frames.active) + len(self._embedding)

    @property
    def requests(self) -> set[str]:
        """Their names."""
        return {*self._intake.frames.active, *self._embedding.active}

    @property
    def tokens(self) -> int:
        """Tokens given so far."""
        return self._intake.frames.tokens

    @property
    def handoffs(self) -> int:
        """Prompts whose KV is kept for other workers."""
        return len(self._intake.handoffs)

    async def over(self) -> None:
        """Return at a moment when nothing is left."""
        while len(self) or self.handoffs:
            await self._intake.idle.wait()
            await self._embedding.idle.wait()
            # Should the two ever disagree with what is counted here, nothing stands still for it.
            await asyncio.sleep(PAUSE_S)

    def give_up(self) -> None:
        """Abort all of it; the edges have it done elsewhere. KV that is being fetched this moment stays."""
        for request in list(self._intake.frames.active):
            self._engine.abort(request)
        self._intake.forsake()
        self._embedding.cancel_all()


async def over_within(work: Work, within_s: float | None, unless: asyncio.Event) -> bool:
    """Wait until the work is over; False if it is not in time, or `unless` is set before."""
    over = asyncio.create_task(work.over(), name="work over")
    stop = asyncio.create_task(unless.wait(), name="unless")
    try:
        await asyncio.wait({over, stop}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        return over.done()
    finally:
        over.cancel()
        stop.cancel()
