"""`headwater engines`: computed from the classes, and what cannot be read is said."""

from pathlib import Path

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.ops.start.engines import as_data, as_table, catalog

ECHO = str(Path(__file__).resolve().parents[4] / "examples" / "engines" / "echo.py")


def test_table_shows_what_the_classes_declare() -> None:
    table = as_table(catalog([ECHO]))
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line.strip()}
    heads = rows["capability"]
    cells = dict(zip(heads, rows["pause"], strict=True))
    assert (cells["sim"], cells["vllm"], cells["echo"]) == ("yes", "(yes)", "-")
    kinds = dict(zip(heads, rows["generate"], strict=True))
    assert [kinds.pop(name, "-") for name in ("diffusers", "sglang_diffusion")] == ["-", "-"]
    assert set(kinds.values()) == {"yes", "(yes)"}
    for capability, possible in (("handoff", "(yes)"), ("encode", "(yes)"), ("image_generation", "-")):
        found = dict(zip(heads, rows[capability], strict=True))
        assert (found["sglang"], found["vllm"]) == (possible, possible)
    assert dict(zip(heads, rows["images"], strict=True))["tensorrt_llm"] == "(yes)"
    assert rows["echo"] == ["-", ECHO]


def test_data_has_every_capability_of_every_engine() -> None:
    found = {one["engine"]: one for one in as_data(catalog())}
    assert found["sim"]["version"]
    assert found["sim"]["capabilities"]["guide"] == "no"
    assert found["vllm"]["capabilities"]["guide"] == "configurable"
    assert len({tuple(one["capabilities"]) for one in found.values()}) == 1


def test_file_that_cannot_be_read_is_listed_with_its_problem(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_this_name\n")
    one = catalog([str(path)])[-1]
    assert "No module named 'nothing_of_this_name'" in one.problem
    assert "No module named" in as_table([*catalog(), one])
    with pytest.raises(EngineUnavailable, match="no file"):
        catalog(["gone.py"])
