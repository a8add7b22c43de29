"""Validation of manifests: core kinds by Kubernetes' published schemas, custom ones by their projects' packages or by what their API says.

The schemas of LeaderWorkerSet and DisaggregatedSet here cover the fields that the chart uses, and refuse all others; pod templates in
them are judged as those of a Deployment are. `python -m tests.deploy.published FOLDER` compares renderings with the projects' own
definitions.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import jsonschema
import msgspec

from tests.deploy.rendered import TOOLS, Object, pod_templates

NEWEST, OLDEST = "1.37", "1.30"

_COUNT: Object = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+%$"}]}


def _closed(required: Sequence[str] = (), **properties: Object) -> Object:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


_GROUPS = _closed(
    ("replicas", "leaderWorkerTemplate"),
    replicas={"type": "integer", "minimum": 0},
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    rolloutStrategy=_closed(
        ("type",),
        type={"enum": ["RollingUpdate"]},
        rollingUpdateConfiguration=_closed(maxSurge=_COUNT, maxUnavailable=_COUNT),
    ),
    leaderWorkerTemplate=_closed(
        ("size", "workerTemplate"),
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
        leaderTemplate={"type": "object"},
        workerTemplate={"type": "object"},
    ),
)
_META = {"type": "object", "required": ["name", "labels"]}


def _kind(version: str, kind: str, spec: Object) -> Object:
    return _closed(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=_META,
        spec=spec,
    )


_ROLE = _closed(
    ("name", "spec"),
    name={"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    spec=_GROUPS,
)
OURS = {
    "LeaderWorkerSet": _kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", _GROUPS),
    "DisaggregatedSet": _kind(
        "disaggregatedset.x-k8s.io/v1",
        "DisaggregatedSet",
        _closed(("roles",), roles={"type": "array", "minItems": 2, "items": _ROLE}),
    ),
}
PROMETHEUS = ("PodMonitor", "PrometheusRule")


@cache
def _kubernetes_validate() -> ModuleType:
    sys.path.append(str(TOOLS / "python"))
    try:
        import kubernetes_validate
    finally:
        sys.path.pop()
    found: ModuleType = kubernetes_validate
    return found


def check(objects: Sequence[Object], version: str) -> None:
    """Fails for an object that its schema refuses, for a core kind that of this version of Kubernetes, and for a kind without one."""
    for one in objects:
        if one["kind"] in OURS:
            jsonschema.validate(one, OURS[one["kind"]])
        elif one["kind"] not in PROMETHEUS:
            check_core(one, version)
    for owner, pod in pod_templates([one for one in objects if one["kind"] in OURS]):
        labels = pod["metadata"]["labels"]
        spec = {"selector": {"matchLabels": labels}, "template": pod}
        check_core(
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": owner["metadata"], "spec": spec},
            version,
        )
    check_prometheus([one for one in objects if one["kind"] in PROMETHEUS])


def check_core(one: Object, version: str) -> None:
    """Fails for an object of Kubernetes' own that this version of it refuses."""
    volumes: list[Any] = one.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", [])
    # Volumes of images are younger than the oldest version.
    is_young = any("image" in volume for volume in volumes)
    _check_text(msgspec.json.encode(one), NEWEST if is_young else version)


@cache
def _check_text(text: bytes, version: str) -> None:
    one = msgspec.json.decode(text)
    module = _kubernetes_validate()
    try:
        module.validate(one, version, strict=True)
    except module.ValidationError as error:
        place = ".".join(map(str, error.path))
        raise AssertionError(f"{one['kind']} {one['metadata']['name']}, {place}: {error.message}") from None


_PROGRAM = """
import { readFileSync } from "node:fs";
import * as kinds from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
for (const one of JSON.parse(readFileSync(0))) new kinds[one.kind](one).validate();
"""


def check_prometheus(objects: Sequence[Object]) -> None:
    """Fails for a PodMonitor or PrometheusRule that the operator's schema refuses."""
    if not objects:
        return
    done = subprocess.run(
        ["node", "--input-type=module", "--eval", _PROGRAM],
        cwd=TOOLS,
        input=msgspec.json.encode(list(objects)),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
