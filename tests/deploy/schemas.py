"""Validation of manifests: core kinds by the published schemas of a version of Kubernetes, custom ones by their projects' definitions.

Metadata and pod templates of custom kinds are judged as those of core kinds are, too: definitions have no schema of the first, and of the
second that of one version.
"""

import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import msgspec

from tests.deploy import definitions
from tests.deploy.rendered import TOOLS, Object, pod_templates

NEWEST, OLDEST = "1.37", "1.30"


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
    custom = [one for one in objects if definitions.is_known(one)]
    for one in objects:
        if one in custom:
            definitions.check(one)
            one = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": one["metadata"]}
        check_core(one, version)
    for owner, pod in pod_templates(custom):
        labels = pod["metadata"]["labels"]
        spec = {"selector": {"matchLabels": labels}, "template": pod}
        check_core(
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": owner["metadata"], "spec": spec},
            version,
        )


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
