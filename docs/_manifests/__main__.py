"""Write deploy/kustomize, or with `--check` compare it and exit with 1 if a file is not current. Needs `make kubernetes`."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "deploy" / "helm" / "headwater"
LAYOUTS: Final = ROOT / "deploy" / "layouts"
KUSTOMIZE: Final = ROOT / "deploy" / "kustomize"
HELM: Final = ROOT / ".kubernetes" / "bin" / "helm"
WIDTH: Final = 1_000_000
"""Characters of a line: none is folded."""


Object = dict[str, Any]


def rendered(*layout: Path) -> list[Object]:
    """The objects of a layout; without one, of the chart's defaults. Raises `CalledProcessError`."""
    values = [word for path in layout for word in ("--values", str(path))]
    command = [str(HELM), "template", "headwater", str(CHART), *values]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    objects = [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one]
    for one in objects:
        # Helm does not apply them.
        one["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "kustomize"
        del one["metadata"]["labels"]["helm.sh/chart"]
    return objects


def files_of(name: str, origin: str, objects: list[Object], base: list[Object]) -> dict[str, str]:
    """The files of an overlay, by their path below deploy/kustomize. What `base` has already is taken from there, if all of that is in it."""
    resources = ["headwater.yaml"]
    if base and all(one in objects for one in base):
        objects = [one for one in objects if one not in base]
        resources.insert(0, "../base")
    head = f"# Written by `python -m docs._manifests` from {origin}.\n"
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": resources,
    }
    return {
        f"{name}/headwater.yaml": head + _text(objects),
        f"{name}/kustomization.yaml": head + _text([kustomization]),
    }


def _text(objects: list[Object]) -> str:
    return str(yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=WIDTH, explicit_start=True))


def all_files() -> dict[str, str]:
    """Every file by its path: the base, which is the chart without a model, and an overlay for each layout."""
    base = rendered()
    files = files_of("base", "the chart's defaults", base, [])
    for layout in sorted(LAYOUTS.glob("*.yaml")):
        files |= files_of(layout.stem, f"deploy/layouts/{layout.name}", rendered(layout), base)
    return files


class _Plain(yaml.CSafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Without anchors, and with the items of lists below their key."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def main() -> int:
    """Write or check all; returns the exit status."""
    wanted = all_files()
    present = {str(path.relative_to(KUSTOMIZE)): path for path in KUSTOMIZE.rglob("*.yaml")}
    stale = sorted(
        {path for path, text in wanted.items() if path not in present or present[path].read_text() != text}
        | (present.keys() - wanted.keys())
    )
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"deploy/kustomize/{path} is not current: make manifests")
        return 1 if stale else 0
    for path in stale:
        if path not in wanted:
            present[path].unlink()
            continue
        target = KUSTOMIZE / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
