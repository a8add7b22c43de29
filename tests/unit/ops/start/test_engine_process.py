"""How an engine process begins: in which Python, as what by its arguments, and with which leader."""

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.engines.launcher import Follower
from headwater.engines.process import EngineInterrupted
from headwater.engines.sglang import launcher
from headwater.engines.sglang.config import SglangSettings
from headwater.engines.vllm import launch
from headwater.engines.vllm.config import VllmSettings
from headwater.ops.config.processes import EngineProcess, with_settings
from headwater.ops.start import engine, engine_process, model, plan
from headwater.schemas.names import host_port


@pytest.fixture
def continued(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What processes are replaced by. None is."""
    seen: list[tuple[Any, ...]] = []

    def execv(path: Any, arguments: list[str]) -> None:
        seen.append((str(path), *arguments[1:]))
        raise InterruptedError

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(engine_process, "has", lambda _: False)
    monkeypatch.delenv(engine_process.INSIDE, raising=False)
    return seen


def program(path: Path) -> Path:
    """An executable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o700)
    return path


def test_a_process_continues_in_the_python_that_is_named(continued: list[Any], tmp_path: Path) -> None:
    """With the same command line, once."""
    other = str(program(tmp_path / "python"))
    with pytest.raises(EngineUnavailable, match="cannot be run"):
        engine_process.enter("sglang", ["engine", "sglang"], other)
    assert continued == [(other, "-m", "headwater.ops.cli", "engine", "sglang")]
    assert os.environ[engine_process.INSIDE] == "sglang"
    with pytest.raises(EngineUnavailable, match="SGLang is missing even in"):
        engine_process.enter("sglang", [], other)
    engine_process.enter("sglang", [], sys.executable)
    assert len(continued) == 1


def test_a_python_that_has_the_engine_is_kept(continued: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made, nothing replaced."""
    monkeypatch.setattr(engine_process, "has", lambda _: True)
    engine_process.enter("sglang", [])
    engine_process.prepare("sglang")
    engine_process.prepare("vllm")
    assert not continued


def test_a_made_environment_is_used_again(
    continued: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One for each engine. Without uv none can be made, and the error says what to do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("UV", str(tmp_path / "no-uv"))
    with pytest.raises(EngineUnavailable, match=r"neither is uv.*headwater's `sglang` extra"):
        engine_process.prepare("sglang")
    failing = program(tmp_path / "uv")
    failing.write_text("#!/bin/sh\nexit 3\n")
    monkeypatch.setenv("UV", str(failing))
    with pytest.raises(EngineUnavailable, match=f"installing SGLang failed at: {failing} venv"):
        engine_process.prepare("sglang")
    failing.write_text('#!/bin/sh\nfor last; do :; done\n[ "$1" != venv ] || mkdir -p "$last"\n')
    made = engine_process.ensure("sglang")
    assert made.parts[-3].startswith("env-sglang-")
    monkeypatch.setenv("UV", str(tmp_path / "no-uv"))
    assert engine_process.ensure("sglang") == made
    with pytest.raises(EngineUnavailable, match="cannot be run"):
        engine_process.enter("sglang", ["x"])
    assert continued == [(str(made), "-m", "headwater.ops.cli", "x")]


def test_a_python_that_is_not_there_is_named() -> None:
    """Before anything is started."""
    with pytest.raises(EngineUnavailable, match="--sglang-python /nowhere/python: there is no such program"):
        engine_process.prepare("sglang", "/nowhere/python")


def test_a_further_node_of_sglang_is_no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It computes with its first node, and reaches no NATS."""
    run: list[SglangSettings] = []
    monkeypatch.setattr(launcher, "follow", run.append)
    monkeypatch.setattr(engine, "run_engine", lambda *_: pytest.fail("it ran as a worker"))
    monkeypatch.setattr("headwater.ops.start.engine_process.enter", lambda *_: None)
    words = ("--nnodes=2", "--node-rank=1", "--dist-init-addr=127.0.0.1:9", "--tp-size=2")
    given_settings = {"worker.engine": "sglang", "worker.model": str(model.ensure()), "sglang.native": words}
    settings = with_settings(EngineProcess(), given_settings)
    assert engine_process.run(settings) == engine_process.FAILED
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
    assert engine_process.run(with_settings(EngineProcess(name="h"), given)) == engine_process.FAILED
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
        ended, gone = threading.Event(), threading.Event()
        given = (host_port(*server.getsockname()), ended, gone)
        watch = threading.Thread(target=engine_process._end_with, args=given)
        watch.start()
        # An engine that looks whether the port is free.
        server.accept()[0].close()
        leader, _ = server.accept()
        monkeypatch.setattr(engine_process, "STANDS_S", 0.0)
        leader.sendall(b"a word")
        watch.join(0.2)
        assert watch.is_alive()
        assert not killed
        leader.close()
        watch.join(10)
    assert killed == [(os.getpid(), signal.SIGTERM)]
    assert gone.is_set()


def test_a_node_that_ends_already_is_not_ended_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own processes are being ended, and nothing is to interrupt that."""
    monkeypatch.setattr("os.kill", lambda *_: pytest.fail("it was"))
    monkeypatch.setattr(engine_process, "STANDS_S", 0.0)
    ended, gone = threading.Event(), threading.Event()
    ended.set()
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = (host_port(*server.getsockname()), ended, gone)
        watch = threading.Thread(target=engine_process._end_with, args=given)
        watch.start()
        server.accept()[0].close()
        watch.join(10)
    assert not watch.is_alive()
    assert not gone.is_set()


@pytest.mark.parametrize(
    ("leader_gone", "number", "code"),
    [(False, None, 1), (False, signal.SIGTERM, 143), (True, signal.SIGTERM, 1)],
)
def test_a_node_whose_leader_ended_is_to_be_started_again(
    monkeypatch: pytest.MonkeyPatch, leader_gone: bool, number: int | None, code: int
) -> None:
    """Supervisors start what failed; what a signal from outside ended stays ended under systemd."""

    class Launcher:
        def run_follower(self, _: object) -> None:
            if leader_gone:
                ends.wait(10)
            if number is not None:
                raise EngineInterrupted(number)

    def end_with(_leader: str, _ended: threading.Event, gone: threading.Event) -> None:
        gone.set()
        ends.set()

    ends = threading.Event()
    monkeypatch.setattr(engine_process, "_unreached", lambda _: "")
    if leader_gone:
        monkeypatch.setattr(engine_process, "_end_with", end_with)
    else:
        monkeypatch.setattr(engine_process, "_end_with", lambda *_: None)
    for name, made in (("plan", [None]), ("check_plan", None), ("of_worker", None), ("spec_of", None)):
        monkeypatch.setattr(plan, name, lambda *_, made=made: made)
    monkeypatch.setattr(plan, "with_model", lambda *_: None)
    monkeypatch.setattr(plan, "launcher_for", lambda _: Launcher())
    follower = Follower("node", leader="127.0.0.1:1", ends_with_it=True)
    assert engine_process._follow(EngineProcess(), follower) == code
