"""Whether a process can store its events: how long its appends and lease renewals have gone unanswered.

A process that cannot persist keeps serving and reports it everywhere: in its health, its metrics, its log and, where
the lease store still works, its lease, from which the edges learn it.
"""

from typing import Any, Final, Protocol

from headwater.actors import metrics
from headwater.schemas.clock import Clock

STALLED_S: Final = 4.0
"""An append or renewal that is unanswered for this long is reported."""

CHECK_PERIOD_S: Final = 0.5
PROBE_S: Final = 5.0
"""How often an idle process appends, to check that it could."""

HINT: Final = (
    "free disk space on the NATS server, or restore its peers; after a full disk its file store stays frozen until "
    "that nats-server is restarted (`headwater up` restarts its own)"
)


class Storing(Protocol):
    """Something that writes to NATS and awaits confirmations: a log writer or a lease."""

    @property
    def stalled_s(self) -> float:
        """Seconds for which it has been waiting for a confirmation; 0 while it is not waiting."""
        ...


class Persistence:
    """Watches the writers of one actor. `log` is the actor's structlog logger."""

    def __init__(self, clock: Clock, log: Any) -> None:
        self._clock = clock
        self._log = log
        self._watched: dict[str, Storing] = {}
        self._reported: set[str] = set()

    def watch(self, what: str, storing: Storing) -> None:
        """Watch `storing` from now on, in place of what was watched as `what` before."""
        self._watched[what] = storing

    def stalled(self) -> dict[str, float]:
        """Seconds for which each writer has been stalled, of those past `STALLED_S`."""
        seconds = {what: round(storing.stalled_s, 1) for what, storing in self._watched.items()}
        return {what: stalled_s for what, stalled_s in seconds.items() if stalled_s >= STALLED_S}

    @property
    def is_stalled(self) -> bool:
        """Is there a writer that cannot store its events?"""
        return bool(self.stalled())

    async def run(self) -> None:
        """Report changes in the log, and the state as a metric. Does not return."""
        while True:
            await self._clock.sleep(CHECK_PERIOD_S)
            stalled = self.stalled()
            for what in self._watched:
                metrics.LOG_STALLED.labels(what).set(stalled.get(what, 0.0))
            for what in sorted(stalled.keys() - self._reported):
                self._log.error("persistence_stalled", what=what, for_s=stalled[what], hint=HINT)
            for what in sorted(self._reported - stalled.keys()):
                self._log.info("persistence_resumed", what=what)
            self._reported = set(stalled)
