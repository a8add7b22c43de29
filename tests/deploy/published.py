"""Validate every rendering by projects' own definitions: `python -m tests.deploy.published FOLDER`, a folder of CustomResourceDefinitions.

Such as config/crd/bases of a checkout of LeaderWorkerSet or Kueue, or the definitions of Prometheus' operator. Fields that a definition
does not have are errors, which an API server would drop with a warning.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.deploy.rendered import LAYOUTS, Object, template


def definitions(folder: Path) -> dict[tuple[str, str], Object]:
    """Schemas by version and kind."""
    found = {}
    for path in sorted(folder.rglob("*.yaml")):
        for one in yaml.load_all(path.read_text(), yaml.CSafeLoader):
            if not one or one.get("kind") != "CustomResourceDefinition":
                continue
            group, kind = one["spec"]["group"], one["spec"]["names"]["kind"]
            for version in one["spec"]["versions"]:
                schema = version["schema"]["openAPIV3Schema"]
                found[f"{group}/{version['name']}", kind] = strict(schema)
    return found


def strict(schema: Any) -> Any:
    """The same schema as JSON Schema has it, closed where the definition names an object's fields."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(one) for name, one in schema.items() if name not in ("format", "description")}
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("pattern", None)
        made.pop("anyOf", None)
        return made | {"type": ["integer", "string"]}
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def judged(folder: Path) -> Iterator[tuple[str, Object, list[str]]]:
    """Each object with a definition, with its layout and what is wrong with it."""
    known = definitions(folder)
    for layout, path in LAYOUTS.items():
        for one in template(path):
            schema = known.get((one["apiVersion"], one["kind"]))
            if schema is None:
                continue
            bare = one | {"metadata": {}}
            errors = jsonschema.Draft7Validator(schema).iter_errors(bare)
            yield layout, one, [f"{error.json_path}: {error.message[:200]}" for error in errors]


def main(folder: Path) -> int:
    """Print each object; 1 if one is wrong, 2 if none has a definition there."""
    wrong = seen = 0
    for layout, one, errors in judged(folder):
        seen += 1
        wrong += bool(errors)
        print(f"{layout}: {one['kind']} {one['metadata']['name']}: {'; '.join(errors) or 'valid'}")
    return 1 if wrong else 0 if seen else 2


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
