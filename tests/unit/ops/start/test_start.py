"""How an engine process is run, by its arguments."""

from pathlib import Path

import pytest

from headwater.engines.sglang import SglangSettings, follower
from headwater.ops.config.processes import EngineProcess
from headwater.ops.start import engine, model, start


def test_a_further_node_of_sglang_is_no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It computes with its first node, and reaches no NATS."""
    run: list[SglangSettings] = []
    monkeypatch.setattr(follower, "run", run.append)
    monkeypatch.setattr(engine, "run_engine", lambda *_: pytest.fail("it ran as a worker"))
    monkeypatch.setattr("headwater.ops.start.environment.enter", lambda *_: None)
    words = ("--nnodes=2", "--node-rank=1", "--dist-init-addr=127.0.0.1:9", "--tp-size=2")
    settings = EngineProcess()
    settings = settings._replace(
        worker=settings.worker._replace(engine="sglang", model=str(model.ensure())),
        sglang=settings.sglang._replace(native=words),
    )
    assert start.run(settings) == 0
    [given] = run
    assert given.native == words
