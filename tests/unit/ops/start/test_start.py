"""How an engine process is run, by its arguments."""

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from headwater.engines.sglang import launcher
from headwater.engines.sglang.config import SglangSettings
from headwater.engines.vllm import launch
from headwater.engines.vllm.config import VllmSettings
from headwater.ops.config.processes import EngineProcess, with_settings
from headwater.ops.start import engine, engine_process, model
from headwater.schemas.names import host_port


def test_a_further_node_of_sglang_is_no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It computes with its first node, and reaches no NATS."""
    run: list[SglangSettings] = []
    monkeypatch.setattr(launcher, "follow", run.append)
    monkeypatch.setattr(engine, "run_engine", lambda *_: pytest.fail("it ran as a worker"))
    monkeypatch.setattr("headwater.ops.start.engine_process.enter", lambda *_: None)
    words = ("--nnodes=2", "--node-rank=1", "--dist-init-addr=127.0.0.1:9", "--tp-size=2")
    given_settings = {"worker.engine": "sglang", "worker.model": str(model.ensure()), "sglang.native": words}
    settings = with_settings(EngineProcess(), given_settings)
    assert engine_process.run(settings) == 0
    [given] = run
    assert given.options.native == words


def test_headless_ranks_of_vllm_are_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute for a leader elsewhere, from the same settings."""
    run: list[VllmSettings] = []
    monkeypatch.setattr(launch, "run", run.append)
    monkeypatch.setattr(engine, "run_engine", lambda *_: pytest.fail("it ran as a worker"))
    monkeypatch.setattr("headwater.engines.vllm.config.on_cpu", lambda: False)
    words = ("--headless", "--data-parallel-size=4", "--data-parallel-start-rank=2")
    given = {"worker.model": str(model.ensure()), "vllm.native": words, "worker.gpus_per_worker": 3}
    assert engine_process.run(with_settings(EngineProcess(name="h"), given)) == 0
    [settings] = run
    assert (settings.options.native, settings.options.gpus_per_worker) == (words, 3)
    assert (settings.worker.name, settings.worker.model) == ("h", str(model.ensure()))


def test_a_further_node_ends_when_its_leader_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine may wait for one that was killed, for good."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda *given: killed.append(given))
    monkeypatch.setattr(engine_process, "LEADER_S", 0.05)
    monkeypatch.setattr(engine_process, "END_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = threading.Thread(target=engine_process._end_with, args=(host_port(*server.getsockname()),))
        watch.start()
        server.accept()[0].close()
        leader, _ = server.accept()
        leader.sendall(b"a word")
        watch.join(0.2)
        assert watch.is_alive()
        assert not killed
        leader.close()
        watch.join(10)
    assert killed == [(os.getpid(), signal.SIGTERM)]
