"""A worker's model: the default one, which is converted once, and the formats that are detected, named or refused."""

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.engines.model_files import ModelFiles, byte_model_files, read_model_files
from headwater.ops.cli import main
from headwater.ops.start import model, plan
from headwater.ops.start.plan import make_engine
from tests.support.processes.line import settings_of


class Conversions:
    """In the place of the process that converts: writes the model once `may_end` is set, or fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.may_end = Event()
        self.begun = 0
        self.fails = False

    def run(self, command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run`."""
        assert not check
        self.begun += 1
        self.may_end.wait()
        if self.fails:
            return subprocess.CompletedProcess(command, 1)
        self.folder.mkdir()
        (self.folder / "model.safetensors").touch()
        return subprocess.CompletedProcess(command, 0)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Conversions:
    """In an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Conversions(model.path())
    monkeypatch.setattr(subprocess, "run", made.run)
    return made


def waits_for(lock: Path) -> bool:
    """Does anything wait for the lock of that file? As Linux lists them."""
    inode = f":{lock.stat().st_ino} " if lock.exists() else "none"
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def test_one_converts_and_the_others_wait(conversions: Conversions) -> None:
    lock = conversions.folder.parent / f".{model.NAME}.lock"
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(model.ensure) for _ in range(2)]
        while not waits_for(lock) and conversions.begun < 2:
            time.sleep(0.001)
        conversions.may_end.set()
        assert {one.result() for one in asked} == {conversions.folder}
    assert conversions.begun == 1


def test_the_next_one_tries_again_after_a_failure(conversions: Conversions) -> None:
    conversions.may_end.set()
    conversions.fails = True
    with pytest.raises(EngineUnavailable, match="give --model a folder"):
        model.ensure()
    conversions.fails = False
    assert model.ensure() == conversions.folder
    assert conversions.begun == 2


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> #}"


def files(template: str) -> ModelFiles:
    return byte_model_files("m")._replace(chat_template=template)


def write_model(folder: Path, template: str) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(byte_model_files("m").tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_detected_unless_named() -> None:
    assert model.find("", "", files(TEMPLATE)).tool_format == "hermes"
    named = model.find("qwen3_xml", "deepseek-r1", files(TEMPLATE))
    assert (named.tool_format, named.tool_reason) == ("qwen3_coder", "--tool-parser")
    assert (named.reasoning_format, named.starts) == ("think_opened", "always")
    off = model.find("none", "none", files(TEMPLATE))
    assert (off.tool_format, off.reasoning_format) == ("", "")


@pytest.mark.parametrize("engine", ["sim", "vllm"])
def test_an_unknown_name_fails_before_anything_starts(engine: str) -> None:
    settings = settings_of("engine", "--engine", engine, "--tool-parser", "hermess")
    with pytest.raises(EngineUnavailable, match=r"--tool-parser hermess: .* did you mean hermes\?"):
        plan.check_plan(settings, [])


def test_a_worker_serves_what_was_found(tmp_path: Path) -> None:
    """This is what its model card says."""
    folder = write_model(tmp_path / "m", TEMPLATE)
    _, served = make_engine(settings_of("engine", "--engine", "sim", "--model", str(folder)), "w")
    assert (served.tool_parser, served.reasoning_parser) == ("hermes", "")
    line = ("engine", "--engine", "sim", "--model", str(folder), "--reasoning-parser", "qwen3")
    _, served = make_engine(settings_of(*line), "w")
    assert (served.tool_parser, served.reasoning_parser) == ("hermes", "think")


def test_inspect_prints_formats_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "m", TEMPLATE)
    assert main(["models", "inspect", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model             m",
        "tool parser       hermes (the chat template has <tool_call>)",
        "reasoning parser  none (no marker of a known format in the chat template nor the tokenizer)",
        "answers begin     outside reasoning",
        "conversations     system messages at the beginning are one; calls are texts; tools are JSON in a system message",
    ]
    assert main(["models", "inspect", str(folder), "--json", "--reasoning-parser", "none"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["tool_format"], shown["reasoning_reason"]) == ("hermes", "--reasoning-parser")
    assert main(["models", "inspect", str(tmp_path / "missing")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_response_template_is_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", TEMPLATE)
    assert read_model_files(folder).response_template == ""
    template: dict[str, object] = {"fields": {"content": {}}}
    config = {"chat_template": TEMPLATE, "response_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = read_model_files(folder)
    assert json.loads(found.response_template) == template
    assert model.find("", "", found).tool_format == "response_template"
    assert model.find("hermes", "none", found).tool_format == "hermes"
    with pytest.raises(EngineUnavailable, match="give it for both, or none"):
        model.find("hermes", "", found)
    with pytest.raises(EngineUnavailable, match="has no response_template"):
        model.find("hf", "none", files(TEMPLATE))
    with pytest.raises(EngineUnavailable, match=r"m: response_template has no fields; name the formats"):
        model.find("", "", found._replace(response_template="{}"))
