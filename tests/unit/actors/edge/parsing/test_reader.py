"""Reading from text that arrives in pieces: markers, and the bounds on what is held back."""

import pytest

from headwater.actors.edge.parsing.grammar import ParsedOutput
from headwater.actors.edge.parsing.reader import HEADER_MAX, markers
from tests.parsers.hard_cases import tool
from tests.unit.actors.edge.parsing.support import parse, parse_pieces


@pytest.mark.parametrize(
    ("text", "ended", "found"),
    [
        ("plain", False, (5, "")),
        ("a<b>c", False, (1, "<b>")),
        ("a<b", False, (1, "")),
        ("a<b", True, (3, "")),
        ("a<b>", False, (1, "")),
        ("a<b>", True, (1, "<b>")),
        ("a<b>+", False, (1, "<b>+")),
        ("<c <b>-", False, (3, "<b>")),
    ],
)
def test_the_longest_marker_counts(text: str, ended: bool, found: tuple[int, str]) -> None:
    assert markers("<b>", "<b>+").find(text, 0, ended=ended) == found


def test_several_first_characters() -> None:
    both = markers("[A]", "<b>")
    assert both.find("x[A]", 0, ended=False) == (1, "[A]")
    assert both.find("x<[", 0, ended=False) == (2, "")
    assert markers().find("x<", 0, ended=False) == (2, "")


@pytest.mark.parametrize("length", [HEADER_MAX - 1, HEADER_MAX, HEADER_MAX + 1, 3 * HEADER_MAX])
def test_headers_are_bounded(length: int) -> None:
    """A marker that no header follows holds back a bounded amount of text, wherever the text is cut."""
    text = "<tool_call>" + "x" * length + "<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    whole = parse_pieces([text], "glm", tools=[tool("f")])
    assert bool(whole.calls) is (length <= HEADER_MAX)
    assert (
        parse_pieces([text[at : at + 100] for at in range(0, len(text), 100)], "glm", tools=[tool("f")])
        == whole
    )
    spaces = "<tool_call>" + " " * length + "<function=f></function></tool_call>"
    whole = parse_pieces([spaces], "qwen3_coder", tools=[tool("f")])
    assert (whole.text == "") is (length <= HEADER_MAX)
    pieces = [spaces[at : at + 100] for at in range(0, len(spaces), 100)]
    assert parse_pieces(pieces, "qwen3_coder", tools=[tool("f")]) == whole


def test_objects_with_other_keys_are_answers() -> None:
    """A person has a name too."""
    tools = [tool("f")]
    for text in ('{"name": "f", "age": 3, "parameters": {}}', '{"age": 3, "name": "f", "parameters": {}}'):
        assert parse(text, "llama3_json", tools=tools) == ParsedOutput(text, "", ())
