"""How an engine process is run, by its arguments."""

from pathlib import Path

import pytest

from headwater.engines.sglang import launcher
from headwater.engines.sglang.config import SglangSettings
from headwater.engines.vllm import launch
from headwater.engines.vllm.config import VllmSettings
from headwater.ops.config.processes import EngineProcess, with_settings
from headwater.ops.start import engine, model, start


def test_a_further_node_of_sglang_is_no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It computes with its first node, and reaches no NATS."""
    run: list[SglangSettings] = []
    monkeypatch.setattr(launcher, "follow", run.append)
    monkeypatch.setattr(engine, "run_engine", lambda *_: pytest.fail("it ran as a worker"))
    monkeypatch.setattr("headwater.ops.start.environment.enter", lambda *_: None)
    words = ("--nnodes=2", "--node-rank=1", "--dist-init-addr=127.0.0.1:9", "--tp-size=2")
    given_settings = {"worker.engine": "sglang", "worker.model": str(model.ensure()), "sglang.native": words}
    settings = with_settings(EngineProcess(), given_settings)
    assert start.run(settings) == 0
    [given] = run
    assert given.options.native == words


def test_headless_ranks_of_vllm_are_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute for a leader elsewhere, from the same settings."""
    run: list[VllmSettings] = []
    monkeypatch.setattr(launch, "run", run.append)
    monkeypatch.setattr(engine, "run_engine", lambda *_: pytest.fail("it ran as a worker"))
    monkeypatch.setattr("headwater.engines.vllm.config.on_cpu", lambda: False)
    words = ("--headless", "--data-parallel-size=4", "--data-parallel-start-rank=2")
    given = {"worker.model": str(model.ensure()), "vllm.native": words, "vllm.dtype": "float32"}
    assert start.run(with_settings(EngineProcess(name="h"), given)) == 0
    [settings] = run
    assert (settings.options.native, settings.options.dtype) == (words, "float32")
    assert (settings.worker.name, settings.worker.model) == ("h", str(model.ensure()))
