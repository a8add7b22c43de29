"""A worker's status: each change is published once, and what it refuses follows from it."""

import asyncio

from headwater.actors.worker.inflight import WorkerStatus
from headwater.actors.worker.settings import WorkerProfile


class Publisher:
    """Counts what is published."""

    def __init__(self) -> None:
        self.count = 0

    def publish_status(self) -> None:
        """Called with each change."""
        self.count += 1


def test_changes_are_published_and_repetitions_are_not() -> None:
    status, publisher = WorkerStatus("w1", WorkerProfile(), asyncio.Event()), Publisher()
    status.set_role("prefill")
    status.publish = publisher.publish_status
    for _ in range(2):
        status.set_state("draining")
        status.set_role("decode")
        status.set_taints(("spot",))
        status.set_loras(("a@1",))
    assert publisher.count == 4
    status.publish = None
    status.set_state("ready")
    assert publisher.count == 4
    assert (status.state, status.role, status.taints, status.loras) == (
        "ready",
        "decode",
        ("spot",),
        ("a@1",),
    )


def test_what_is_refused_and_when_the_engine_is_judged() -> None:
    stopping = asyncio.Event()
    status = WorkerStatus("w1", WorkerProfile("both", "i", "fast", ("spot",)), stopping)
    assert (status.instance, status.tier, status.taints) == ("i", "fast", ("spot",))
    assert (status.refusal(), status.is_serving) == ("", True)
    status.set_state("draining")
    assert (status.refusal(), status.is_serving) == ("worker w1 is draining", True)
    for state in ("paused", "sleeping"):
        status.set_state(state)
        assert (status.refusal(), status.is_serving) == (f"worker w1 is {state}", False)
    status.set_state("ready")
    stopping.set()
    assert (status.refusal(), status.is_serving) == ("worker w1 is shutting down", False)
    status.failure_reason = "worker w1 failed: it died"
    assert status.refusal() == "worker w1 failed: it died"
