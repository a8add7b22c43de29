"""The engines that can be chosen: what names one, and what each mistake says."""

from pathlib import Path
from textwrap import dedent

import pytest

from headwater.engines import registry
from headwater.engines.engine import EngineUnavailable
from headwater.engines.launcher import EngineLauncher, launcher_type
from headwater.engines.sim.engine import SimEngine
from headwater.engines.traits import EngineTraits

ONE = """
class {name}:
    async def start(self, setup): ...
    async def generate(self, request):
        yield 1
"""


def file(folder: Path, *texts: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(dedent("".join(texts)))
    return str(path)


def test_own_engines_are_entry_points_and_can_all_be_created() -> None:
    own = {name: entry for name, entry in registry.installed().items() if entry.is_own}
    assert set(own) >= {"sim", "vllm"}
    for name, entry in own.items():
        assert launcher_type(name).make is not EngineLauncher.make
        assert entry.module.startswith(launcher_type(name).__module__.rpartition(".")[0]), "in its package"
    assert registry.load(own["sim"]) is SimEngine
    assert own["sim"].origin.startswith("headwater ")


def test_file_has_one_engine_or_its_class_is_named(tmp_path: Path) -> None:
    one = file(tmp_path, ONE.format(name="One"))
    entry = registry.find(one)
    assert (entry.name, entry.is_file, entry.is_own) == ("mine", True, False)
    assert registry.load(entry).__name__ == "One"
    two = file(tmp_path, ONE.format(name="One"), ONE.format(name="Two"), name="two.py")
    assert registry.load(registry.find(f"{two}:Two")).__name__ == "Two"
    with pytest.raises(EngineUnavailable, match=r"several engines \(One, Two\).*two.py:One"):
        registry.load(registry.find(two))
    none = file(tmp_path, "class Half:\n    async def start(self): ...\n", name="none.py")
    with pytest.raises(EngineUnavailable, match="no class with the methods start and generate"):
        registry.load(registry.find(none))
    with pytest.raises(EngineUnavailable, match="has no class Three"):
        registry.load(registry.find(f"{two}:Three"))


def test_imported_class_does_not_count_and_a_neighbour_can_be_imported(tmp_path: Path) -> None:
    file(tmp_path, ONE.format(name="Base"), name="neighbour_of_mine.py")
    path = file(tmp_path, "from neighbour_of_mine import Base\nclass Mine(Base): ...\n", name="importing.py")
    assert registry.load(registry.find(path)).__name__ == "Mine"


def test_class_of_a_module_is_named_after_the_module() -> None:
    entry = registry.find("headwater.engines.sim.engine:SimEngine")
    assert (entry.name, registry.load(entry)) == ("engine", SimEngine)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vlm", "did you mean vllm"),
        ("", "installed are "),
        ("gone.py", "there is no file /.*/gone.py"),
        ("no.such:Engine", "No module named 'no'"),
        ("headwater.engines.sim:Nothing", "has no class Nothing"),
    ],
)
def test_unknown_engine_is_an_error_with_what_there_is(text: str, message: str) -> None:
    with pytest.raises(EngineUnavailable, match=message):
        registry.load(registry.find(text))


def test_broken_file_names_its_error_and_line(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match=r"broken.py cannot be imported: SyntaxError.*line 1"):
        registry.load(registry.find(file(tmp_path, "def (:\n", name="broken.py")))
    path = file(tmp_path, "1 / 0\n", name="raises.py")
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="ZeroDivisionError"):
            registry.load(registry.find(path))
    with pytest.raises(EngineUnavailable, match="no name for an engine"):
        registry.find(file(tmp_path, "", name="my engine.py"))


def test_package_that_offers_a_taken_name_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "other-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.5\n")
    points = info / "entry_points.txt"
    points.write_text("[headwater.engines]\nmine = other.engine:Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = registry.find("mine")
    assert (entry.origin, entry.is_own, entry.module, entry.attribute) == (
        "other 1.5",
        False,
        "other.engine",
        "Mine",
    )
    points.write_text("[headwater.engines]\nsim = other.engine:Mine\n")
    registry._entries.cache_clear()
    with pytest.raises(EngineUnavailable, match="both offer an engine 'sim'"):
        registry.find("sim")


def test_a_package_says_what_is_to_be_known_of_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `TRAITS`, for which nothing but the package is imported; without them, and for a file, the defaults hold."""
    info = tmp_path / "other-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.5\n")
    points = "".join(f"{name} = {name}_engines.engine:Mine\n" for name in ("heavy", "plain", "wrong"))
    (info / "entry_points.txt").write_text(f"[headwater.engines]\n{points}")
    for name, text in (
        (
            "heavy",
            "from headwater.engines.traits import EngineTraits\nTRAITS = EngineTraits(loads='weights')\n",
        ),
        ("plain", ""),
        ("wrong", "TRAITS = 'weights'\n"),
    ):
        package = tmp_path / f"{name}_engines"
        package.mkdir()
        (package / "__init__.py").write_text(text)
        (package / "engine.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.traits_of("heavy").loads == "weights"
    every = registry.all_traits.__wrapped__()
    assert (every["heavy"].loads, every["wrong"]) == ("weights", EngineTraits()), "its fault is not another's"
    assert registry.traits_of("plain") == EngineTraits()
    assert registry.traits_of(file(tmp_path, ONE.format(name="One"))) == EngineTraits()
    with pytest.raises(EngineUnavailable, match=r"wrong_engines\.TRAITS"):
        registry.traits_of("wrong")


def test_own_engines_have_traits() -> None:
    """What commands ask of an engine by name is said by its package, and nowhere else."""
    own = registry.all_traits()
    assert next(iter(own)) == registry.DEFAULT_ENGINE
    assert [name for name, traits in sorted(own.items()) if traits.loads == "nothing"] == ["sim"]
    assert set(own["sglang"].shared_arguments) == set(own["vllm"].shared_arguments)
