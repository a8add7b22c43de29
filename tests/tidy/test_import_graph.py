"""The dependency diagram: cycles, reduction, layers, and the generated parts of its page."""

import pytest

from tests.tidy.draw import layers_of, reduced, svg_of
from tests.tidy.import_graph import PAGE, cycles, read_graph, replace_part, report, summary


def test_cycles_are_strongly_connected_components() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}
    assert cycles(imports) == [["a", "b", "c"]]
    assert cycles({"a": {"b"}, "b": set()}) == []


def test_an_importer_is_above_what_it_imports() -> None:
    imports = {"low": set(), "middle": {"low"}, "top": {"low", "middle"}}
    assert layers_of(imports, {}) == [["top"], ["middle"], ["low"]]
    assert reduced(imports, {})["top"] == {"middle"}


def test_members_of_a_cycle_share_a_layer_and_keep_their_edges() -> None:
    imports = {"a": {"b", "low"}, "b": {"a"}, "low": set()}
    cycle_of = {"a": 0, "b": 0}
    assert layers_of(imports, cycle_of) == [["a", "b"], ["low"]]
    assert reduced(imports, cycle_of)["b"] == {"a"}


def test_the_drawing_has_a_box_for_each_package() -> None:
    text = svg_of({"a": {"b"}, "b": set()}, {"a": "1 file", "b": "2 files"}, {}, {"b"}, "a <test>")
    assert text.count("<rect") == 3
    assert "a &lt;test&gt;" in text


def test_the_package_itself_is_read() -> None:
    graph = read_graph()
    assert graph.packages["schemas"].files > 1
    assert "schemas" in graph.packages["events"].imports
    assert "`schemas`" in report(graph)
    assert dict(summary(graph))["packages (folders)"] == str(len(graph.packages))


def test_parts_of_the_page_are_replaced() -> None:
    page = PAGE.read_text()
    for part in ("comparison", "traces", "before", "after"):
        assert "new content" in replace_part(page, part, "new content")
    with pytest.raises(ValueError, match="no part nonsense"):
        replace_part(page, "nonsense", "")


def test_the_page_shows_the_present_packages() -> None:
    """Else run `make graph`. Lines and imports may differ until then."""
    after = PAGE.read_text().partition("<!-- after: generated")[2].partition("<!-- end of after -->")[0]
    shown = {line.split("`")[1] for line in after.splitlines() if line.startswith("| `")}
    assert shown == set(read_graph().packages)
