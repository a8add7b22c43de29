"""What real Helm makes of the chart, as objects. Helm and kubectl come by `make kubernetes`."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "headwater"
LAYOUTS = {path.stem: path for path in sorted((DEPLOY / "layouts").glob("*.yaml"))}
TOOLS = ROOT / ".kubernetes"

Object = dict[str, Any]


def tool(name: str) -> str:
    """The path of `helm` or `kubectl`. Fails where it is not installed."""
    path = TOOLS / "bin" / name
    assert path.exists(), f"these tests need {name}: make kubernetes"
    return str(path)


def helm(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run helm to its end, whatever that is."""
    return subprocess.run(
        [tool("helm"), *arguments], input=stdin, capture_output=True, text=True, check=False
    )


def template(*values: Path, text: str = "", sets: Sequence[str] = ()) -> list[Object]:
    """The objects of the chart with these files of values, and with those in `text`. Fails with what Helm says."""
    done = _template(values, text, sets)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one]


def refusal(text: str) -> str:
    """What Helm says of values that it refuses. Fails if it does not."""
    done = _template((), text, ())
    assert done.returncode != 0, f"these values are accepted: {text}"
    return done.stderr


def _template(values: Sequence[Path], text: str, sets: Sequence[str]) -> subprocess.CompletedProcess[str]:
    files = [word for path in values for word in ("--values", str(path))]
    more = ["--values", "-"] if text else []
    single = [word for one in sets for word in ("--set-json", one)]
    return helm("template", "headwater", str(CHART), *files, *more, *single, stdin=text)


def pod_templates(objects: Sequence[Object]) -> Iterator[tuple[Object, Object]]:
    """Each object with each of its pods' templates."""
    for one in objects:
        match one["kind"]:
            case "Deployment" | "StatefulSet":
                yield one, one["spec"]["template"]
            case "LeaderWorkerSet":
                yield from ((one, pod) for pod in _group_pods(one["spec"]))
            case "DisaggregatedSet":
                for role in one["spec"]["roles"]:
                    yield from ((one, pod) for pod in _group_pods(role["spec"]))


def _group_pods(spec: Object) -> Iterator[Object]:
    group = spec["leaderWorkerTemplate"]
    if "leaderTemplate" in group:
        yield group["leaderTemplate"]
    yield group["workerTemplate"]


def of_kind(objects: Sequence[Object], kind: str) -> list[Object]:
    """Those of one kind."""
    return [one for one in objects if one["kind"] == kind]
