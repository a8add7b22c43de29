"""Checks TensorRT-LLM's health from a thread: a call to a rank that has died may block."""

import threading
from typing import Any

from headwater.schemas.clock import Clock

PERIOD_S = 1.0
ANSWER_S_MAX = 30.0
"""Longer than the stalls of ten seconds that it is known for (TensorRT-LLM 12640)."""


class Watchdog:
    """`verdict` is why the engine has died, "" if it has not."""

    def __init__(self, llm: Any, clock: Clock) -> None:
        self._llm = llm
        self._clock = clock
        self._stop = threading.Event()
        self._asked_s: float | None = None
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="TensorRT-LLM health", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """End, without waiting for a call that blocks."""
        self._stop.set()

    @property
    def verdict(self) -> str:
        """See the class."""
        asked_s = self._asked_s
        if not self._problem and asked_s is not None:
            waited = self._clock.monotonic_s() - asked_s
            if waited > ANSWER_S_MAX:
                return f"TensorRT-LLM has not answered a health check for {waited:.0f} s"
        return self._problem

    def _run(self) -> None:
        while not self._stop.is_set() and not self._problem:
            self._asked_s = self._clock.monotonic_s()
            try:
                self._problem = _unhealthy(self._llm)
            except Exception as error:
                self._problem = f"TensorRT-LLM's health check failed: {type(error).__name__}: {error}"
            self._asked_s = None
            self._stop.wait(PERIOD_S)


def _unhealthy(llm: Any) -> str:
    """Why it is not healthy; the first cause, if it keeps one."""
    check = getattr(llm, "_check_health", None)
    executor = getattr(llm, "_executor", None)
    if check is None:
        check = getattr(executor, "check_health", None)
    if check is None or check():
        return ""
    cause = getattr(executor, "_fatal_error", None)
    return f"TensorRT-LLM has died: {cause}" if cause else "TensorRT-LLM has died"
