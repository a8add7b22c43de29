"""The end of vLLM's engine where its own end fails, as it does if a process ends while it is being killed."""

from types import SimpleNamespace
from typing import Any

from headwater.engines.vllm.launch import shut_down


class Engine:
    """An AsyncLLM whose `shutdown` fails so many times before it has closed its sockets. `calls`: what was done."""

    def __init__(self, failures: int) -> None:
        self.calls: list[str] = []
        self._failures = failures
        self.process: Any = SimpleNamespace(
            kill=lambda: self.calls.append("kill"), join=lambda: self.calls.append("join")
        )
        manager = SimpleNamespace(processes=[self.process])
        self.engine_core: Any = SimpleNamespace(resources=Resources(manager, self.calls))

    def shutdown(self) -> None:
        """See AsyncLLM."""
        self.calls.append("shutdown")
        if self._failures:
            self._failures -= 1
            raise ValueError("process no longer exists")


class Resources:
    """What `MPClient.resources` is: calling it closes the sockets."""

    def __init__(self, manager: Any, calls: list[str]) -> None:
        self.engine_manager = manager
        self._calls = calls

    def __call__(self) -> None:
        self._calls.append("close")


def test_an_end_that_succeeds_is_all() -> None:
    """Nothing is killed."""
    engine = Engine(0)
    shut_down(engine)
    assert engine.calls == ["shutdown"]


def test_an_end_that_fails_leaves_neither_processes_nor_sockets() -> None:
    """And the rest of vLLM's own end is done."""
    engine = Engine(1)
    shut_down(engine)
    assert engine.calls == ["shutdown", "kill", "join", "close", "shutdown"]
