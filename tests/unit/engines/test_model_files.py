"""What a model's folder says of media, and its chat template."""

import json
from pathlib import Path

import pytest

from headwater.actors.edge.chat_template import ChatTemplate
from headwater.engines.engine import EngineUnavailable
from headwater.engines.model_files import read_chat_template, read_model_files

SETTINGS = {"patch_size": 14, "max_pixels": 50_176}


def digest(folder: Path, **files: object) -> str:
    """Of a folder with these files, each as JSON."""
    folder.mkdir()
    for name, content in {"tokenizer": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=len(folder.name)))
    return read_model_files(folder).media_processor


def test_settings_of_media_are_known_by_their_values(tmp_path: Path) -> None:
    """How a file is written makes no difference; a model without media has none."""
    reordered = dict(reversed(SETTINGS.items()))
    first = digest(tmp_path / "a", preprocessor_config=SETTINGS)
    assert digest(tmp_path / "longer", preprocessor_config=reordered, config={"vocab_size": 5}) == first
    assert digest(tmp_path / "text", config={"vocab_size": 5}) == ""


@pytest.mark.parametrize(
    "files",
    [
        {"preprocessor_config": {**SETTINGS, "max_pixels": 784}},
        {"preprocessor_config": SETTINGS, "video_preprocessor_config": {"size": 1}},
        {"processor_config": SETTINGS},
    ],
)
def test_any_other_setting_is_another_digest(tmp_path: Path, files: dict[str, object]) -> None:
    """Of images, of videos, or of both in one file, as newer models have it."""
    assert digest(tmp_path / "a", preprocessor_config=SETTINGS) != digest(tmp_path / "b", **files)


WITHOUT = "\n{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
WITH = (
    "{% macro shown(tool) %}({{ tool.function.name }}){% endmacro %}"
    "{% for tool in tools %}{{ shown(tool) }}{% endfor %}" + WITHOUT
)


def template(folder: Path, *named: tuple[str, str]) -> ChatTemplate:
    """That of a folder whose tokenizer has several."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    listed = [{"name": name, "template": source} for name, source in named]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    return ChatTemplate(read_model_files(folder).chat_template, {})


def test_a_template_for_tools_is_used_where_tools_are_offered(tmp_path: Path) -> None:
    """As published models of Command R and Hermes have it. Nothing is added to what either writes."""
    messages, tool = [{"role": "user", "content": "Hi"}], {"function": {"name": "f"}}
    both = template(tmp_path / "both", ("default", WITHOUT), ("tool_use", WITH), ("rag", "never"))
    assert both.render(messages) == ChatTemplate(WITHOUT, {}).render(messages)
    assert both.render(messages, tools=[tool]) == ChatTemplate(WITH, {}).render(messages, tools=[tool])
    one = template(tmp_path / "one", ("tool_use", WITH))
    assert one.render(messages, tools=[tool]) == both.render(messages, tools=[tool])
    assert template(tmp_path / "default", ("default", WITHOUT)).render(messages) == both.render(messages)


def test_templates_in_files_of_their_own(tmp_path: Path) -> None:
    """Older models with images have one in JSON; transformers writes named ones into a folder."""
    messages, tool = [{"role": "user", "content": "Hi"}], {"function": {"name": "f"}}
    json_file, named = tmp_path / "json", tmp_path / "named"
    for folder in (json_file, named):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "other"}))
    (json_file / "chat_template.json").write_text(json.dumps({"chat_template": WITH}))
    (named / "chat_template.jinja").write_text(WITHOUT)
    (named / "additional_chat_templates").mkdir()
    (named / "additional_chat_templates" / "tool_use.jinja").write_text(WITH)
    wanted = ChatTemplate(WITH, {}).render(messages, tools=[tool])
    for folder in (json_file, named):
        found = ChatTemplate(read_model_files(folder).chat_template, {})
        assert found.render(messages, tools=[tool]) == wanted
    found = ChatTemplate(read_model_files(named).chat_template, {})
    assert found.render(messages) == ChatTemplate(WITHOUT, {}).render(messages)


def test_a_model_with_a_program_in_place_of_a_template(tmp_path: Path) -> None:
    """As DeepSeek V3.2 and V4 are published. Any other folder without a template has no chats."""
    (tmp_path / "tokenizer.json").write_text("{}")
    for model_type, said in (("deepseek_v32", "function_calls>"), ("deepseek_v4", "tool_calls>")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert said in read_model_files(tmp_path).chat_template
        (tmp_path / "chat_template.jinja").write_text(WITH)
        assert read_model_files(tmp_path).chat_template == WITH
        (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    assert not read_model_files(tmp_path).chat_template


def test_a_template_is_read(tmp_path: Path) -> None:
    """The text that is there."""
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages }}")
    assert read_chat_template(str(path)) == "{{ messages }}"


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "binary"])
def test_a_template_that_is_none_is_refused(tmp_path: Path, kind: str) -> None:
    """Missing, a folder, empty, not text."""
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(b"" if kind == "empty" else b"\xff\xfe\x00")
    with pytest.raises(EngineUnavailable, match=rf"--chat-template {path}: .*[Oo]mit it"):
        read_chat_template(str(path))
