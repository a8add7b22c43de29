"""Environments of engines: which Python a process continues in."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.ops.start import engine_process


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
