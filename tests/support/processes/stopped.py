"""Processes of a fleet that stand still, so that a test reaches a state and can hold it."""

import contextlib
import os
import signal


class StoppedProcesses:
    """Processes that stand still."""

    def __init__(self) -> None:
        self._pids: set[int] = set()

    def stop(self, *pids: int) -> None:
        """SIGSTOP."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            self._pids.add(pid)

    def resume(self, *pids: int) -> None:
        """SIGCONT; without arguments: of all. One that was killed is left out."""
        for pid in pids or tuple(self._pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            self._pids.discard(pid)
