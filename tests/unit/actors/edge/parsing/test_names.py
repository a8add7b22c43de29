"""Names of parsers: every one that vLLM and SGLang accept is either a format of ours or refused by name."""

import ast
import importlib.util
from collections.abc import Collection
from pathlib import Path

import pytest

from headwater.actors.edge.parsing import selection
from headwater.actors.edge.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from headwater.actors.edge.parsing.selection import UnknownParser, reasoning_format_of, tool_format_of

KNOWN_TOOLS = {
    *TOOL_FORMATS,
    selection.RESPONSE_TEMPLATE,
    *selection.TOOL_ALIASES,
    *selection.TOOL_UNSUPPORTED,
}
KNOWN_REASONING = {
    *REASONING_FORMATS,
    selection.RESPONSE_TEMPLATE,
    *selection.REASONING_ALIASES,
    *selection.REASONING_UNSUPPORTED,
}


def keys_of(path: Path, table: str) -> set[str]:
    """The keys of a module's table, without importing the module."""
    for node in ast.parse(path.read_text()).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Dict)
            and ast.unparse(node.targets[0]) == table
        ):
            return {str(ast.literal_eval(key)) for key in node.value.keys if key is not None}
    raise AssertionError(f"{path} has no table {table}")


@pytest.mark.parametrize(
    ("module", "table", "known"),
    [
        ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER", KNOWN_TOOLS),
        ("reasoning", "_REASONING_PARSERS_TO_REGISTER", KNOWN_REASONING),
    ],
)
def test_every_name_of_the_installed_vllm_is_known(module: str, table: str, known: Collection[str]) -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    theirs = keys_of(Path(found.origin).parent / module / "__init__.py", table)
    assert len(theirs) > 30
    assert theirs <= set(known)


def test_aliases_mean_formats() -> None:
    assert set(selection.TOOL_ALIASES.values()) <= {*TOOL_FORMATS, selection.RESPONSE_TEMPLATE}
    assert set(selection.REASONING_ALIASES.values()) <= {*REASONING_FORMATS, selection.RESPONSE_TEMPLATE}
    assert not set(selection.TOOL_ALIASES) & (set(TOOL_FORMATS) | selection.TOOL_UNSUPPORTED)
    assert not set(selection.REASONING_ALIASES) & (set(REASONING_FORMATS) | selection.REASONING_UNSUPPORTED)


def test_names() -> None:
    assert tool_format_of("hermes") == "hermes"
    assert tool_format_of("qwen25") == "hermes"
    assert tool_format_of("none") == ""
    assert reasoning_format_of("deepseek-r1") == "think_opened"
    assert reasoning_format_of("none") == ""
    with pytest.raises(
        UnknownParser, match=r"--tool-parser hermess: .* did you mean hermes\? \(accepted: .*qwen25"
    ):
        tool_format_of("hermess")
    with pytest.raises(UnknownParser, match="a format that Headwater does not have"):
        tool_format_of("inkling")
    with pytest.raises(UnknownParser, match="is no parser"):
        tool_format_of("forced_call")
    with pytest.raises(UnknownParser, match="--reasoning-parser hy_v4"):
        reasoning_format_of("hy_v4")
