"""The Dockerfiles: a linter's verdict, and the wheel from what is sent to the builder. No image is built here: that takes a registry."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import headwater
from headwater.engines import registry
from tests.deploy.rendered import CHART, DEPLOY, ROOT, TOOLS, template
from tests.packaging.test_distribution import sources

IMAGES = DEPLOY / "images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
BAKE = json.loads((IMAGES / "docker-bake.json").read_text())


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_linter_finds_nothing(path: Path) -> None:
    done = subprocess.run(
        [str(TOOLS / "python" / "bin" / "hadolint"), str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_the_charts_user(path: Path) -> None:
    """And waits for nothing that could ignore a signal."""
    words = path.read_text().splitlines()
    (user,) = {line for line in words if line.startswith("USER 1")}
    values = (CHART / "values.yaml").read_text()
    assert f"runAsUser: {user.removeprefix('USER ').partition(':')[0]}\n" in values
    assert 'ENTRYPOINT ["tini", "--"]' in words


def test_chart_images_and_package_are_of_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (
        chart["version"] == chart["appVersion"] == BAKE["variable"]["TAG"]["default"] == headwater.__version__
    )


def test_each_engine_that_the_chart_deploys_has_an_image() -> None:
    """By the name that the chart asks for, from a base of its vendor, with extras that the package has."""
    values = template(
        text="models: {a: {engine: vllm, modelArtifacts: {name: a, uri: 'hf://a/a'}}, b: {engine: sglang, modelArtifacts: {name: b, uri: 'hf://a/b'}}, "
        "c: {engine: tensorrt_llm, modelArtifacts: {name: c, uri: 'hf://a/c'}}}\nnats: {storage: {size: 40Gi}}"
    )
    wanted = {
        container["image"].partition(":")[0]
        for one in values
        if one["kind"] in ("Deployment", "StatefulSet")
        for container in one["spec"]["template"]["spec"]["containers"]
    }
    built = {target["tags"][0].partition(":")[0] for target in BAKE["target"].values()}
    assert wanted == built
    assert set(BAKE["group"]["default"]["targets"]) == set(BAKE["target"])
    assert {"vllm", "sglang", "tensorrt_llm"} <= registry.installed().keys()
    for name, target in BAKE["target"].items():
        assert (ROOT / target["dockerfile"]).exists()
        assert ("BASE" in target.get("args", {})) == (name != "control")


def sent(dockerfile: Path, to: Path) -> None:
    """Copy what the file beside a Dockerfile lets through: `!` admits what `*` keeps out."""
    rules = (dockerfile.parent / f"{dockerfile.name}.dockerignore").read_text().splitlines()
    admitted = [rule[1:] for rule in rules if rule.startswith("!")]
    left_out = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]
    for name in admitted:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, to / name, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
        else:
            shutil.copy(path, to / name)


@pytest.mark.soak
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_wheel_is_whole_that_an_image_installs(path: Path, tmp_path: Path) -> None:
    """From what reaches the builder: every module, and the data beside them."""
    context, out = tmp_path / "context", tmp_path / "wheels"
    context.mkdir()
    sent(path, context)
    command = [sys.executable, "-m", "uv", "build", "--wheel", "--quiet", "--out-dir", str(out), str(context)]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    assert {name for name in names if name.endswith((".py", "py.typed", ".jinja"))} == sources()
    assert "headwater/ops/monitoring/alerts.yaml" in names
