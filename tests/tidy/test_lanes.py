"""Tests that start processes do not run next to others of their kind."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.lanes import ENGINES, PROCESSES, lane
from tests.tidy.source import ROOT


@pytest.mark.parametrize(
    ("nodeid", "scope", "wanted"),
    [
        ("tests/system/test_up.py::test_a@tests/system/test_up.py", "tests/system/test_up.py", PROCESSES),
        ("tests/system/engines/test_videos.py::test_a[b]@vllm", "vllm", ENGINES),
        ("tests/engines/test_images.py::test_a[sglang]@sglang", "sglang", ENGINES),
        ("tests/engines/test_images.py::test_a@tests/engines/test_images.py", "tests/engines/x", ENGINES),
        ("tests/clients/test_plain.py::test_a@clients", "clients", ENGINES),
        ("tests/unit/schemas/test_hashing.py::test_a@x", "x", "x"),
        ("test_sample.py::test_a", "test_sample.py::test_a", "test_sample.py::test_a"),
    ],
)
def test_a_lane_joins_groups_and_folders(nodeid: str, scope: str, wanted: str) -> None:
    assert lane(nodeid, scope) == wanted


def _marks(path: Path) -> tuple[set[str], set[str]]:
    """Names of the marks in a module, and of the groups among them."""
    names, groups = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark":
            names.add(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.xdist_group":
            groups |= {str(one.value) for one in node.args if isinstance(one, ast.Constant)}
    return names, groups


def test_every_module_that_starts_processes_is_in_a_lane() -> None:
    """Those of the engines' contract mark the parameters with vLLM; those with SGLang run in an environment of their own.

    A parameter's group is in the lane of its folder, or has that of its engine.
    """
    assert all(
        lane("tests/engines/test_a.py::test", group) == ENGINES for group in ("vllm", "sglang", "other")
    )
    contract = ROOT / "tests" / "contract" / "engine"
    lost = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if contract not in path.parents and re.search(r"mark\.(processes|vllm|sglang)\b", path.read_text()):
            names, groups = _marks(path)
            place = str(path.relative_to(ROOT))
            if names & {"processes", "vllm", "sglang"} and not any(
                lane(f"{place}::test", group) in (ENGINES, PROCESSES) for group in groups or {place}
            ):
                lost.append(place)
    assert not lost, lost
