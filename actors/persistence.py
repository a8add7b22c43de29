"""Whether a process can store what it says: how long its appends and lease renewals have been without an answer.

A process that cannot persist goes on serving, and tells everybody: its health, its metrics, its log and, where the
lease store still works, its lease, from which the edges learn of it.
"""

from collections.abc import Callable
from typing import Any, Final

from headwater.actors import metrics
from headwater.schemas.clock import Clock

STALLED_S: Final = 4.0
"""An append or renewal without an answer for so long is no hiccup."""

LOOK_S: Final = 0.5
PROBE_S: Final = 5.0
"""How often an idle process appends, to know whether it could."""

MEND: Final = (
    "make room on the NATS server's disk, or bring its servers back; after a full disk its file store stays frozen "
    "until that nats-server is restarted (`headwater up` restarts its own): restart that nats-server"
)


class Persistence:
    """Looks at the appends of one actor. `add` names what is stored, and gives the seconds without an answer."""

    def __init__(self, clock: Clock, log: Any) -> None:
        self._clock = clock
        self._log = log
        self._sources: dict[str, Callable[[], float]] = {}
        self._told: set[str] = set()

    def add(self, what: str, stalled_s: Callable[[], float]) -> None:
        """Look at one more thing from now on."""
        self._sources[what] = stalled_s

    def stalled(self) -> dict[str, float]:
        """Seconds for which each thing could not be stored, of those that are no hiccup."""
        found = {what: round(seconds(), 1) for what, seconds in self._sources.items()}
        return {what: seconds for what, seconds in found.items() if seconds >= STALLED_S}

    @property
    def is_stalled(self) -> bool:
        """Is there anything that cannot be stored?"""
        return bool(self.stalled())

    async def run(self) -> None:
        """Tell of changes for ever."""
        while True:
            await self._clock.sleep(LOOK_S)
            stalled = self.stalled()
            for what in self._sources:
                metrics.LOG_STALLED.labels(what).set(stalled.get(what, 0.0))
            for what in sorted(stalled.keys() - self._told):
                self._log.error("not_persisting", what=what, for_s=stalled[what], mend=MEND)
            for what in sorted(self._told - stalled.keys()):
                self._log.info("persisting_again", what=what)
            self._told = set(stalled)
