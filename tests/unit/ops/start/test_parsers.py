"""A worker's parsers: detected, named, or refused."""

import json
from pathlib import Path

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.engines.model_files import ModelFiles, byte_model_files, read_model_files
from headwater.ops.cli import main
from headwater.ops.start import model, plan
from headwater.ops.start.plan import make_engine
from tests.support.processes.line import settings_of

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
