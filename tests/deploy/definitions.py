"""Custom kinds by the definitions that their projects publish. `tests/deploy/crds` has their schemas, whole but for descriptions; one comes there by

curl -fL "$URL" | python -m tests.deploy.definitions "$URL" > tests/deploy/crds/KIND.json

Fields that a schema does not name are errors, which an API server would drop with a warning. Rules in CEL (`x-kubernetes-validations`) are not evaluated.
"""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from jsonschema import Draft4Validator, ValidationError, validators

from tests.deploy.rendered import Object

FOLDER: Final = Path(__file__).parent / "crds"


def taken(source: str, text: str) -> Object:
    """What is kept of a CustomResourceDefinition that was published at `source`."""
    spec = yaml.load(text, yaml.CSafeLoader)["spec"]
    schemas = {
        f"{spec['group']}/{version['name']}": _undescribed(version["schema"]["openAPIV3Schema"])
        for version in spec["versions"]
        if version["served"]
    }
    return {"source": source, "kind": spec["names"]["kind"], "schemas": schemas}


def _undescribed(schema: Any) -> Any:
    """The same without descriptions: a field of an object may be called so as well, and its schema is no text."""
    if isinstance(schema, list):
        return [_undescribed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _undescribed(one)
        for name, one in schema.items()
        if name != "description" or not isinstance(one, str)
    }


def closed(schema: Object) -> Object:
    """The same schema as JSON Schema has it, in which objects have no other fields than an API server keeps."""
    made = schema | {"properties": {name: closed(one) for name, one in schema.get("properties", {}).items()}}
    for name in ("items", "additionalProperties"):
        if isinstance(made.get(name), dict):
            made[name] = closed(made[name])
    if made.get("type") == "object" and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if made.get("x-kubernetes-list-type") == "set":
        made["uniqueItems"] = True
    return made


def _distinct(_: Any, keys: list[str], items: list[Object], schema: Object) -> Iterator[ValidationError]:
    """Refuse two items with the same keys."""
    fields = schema["items"]["properties"]
    found = [tuple(one.get(key, fields[key].get("default")) for key in keys) for one in items]
    if len(set(found)) < len(found):
        yield ValidationError(f"two items have the same {' and '.join(keys)}: {found}")


_Validator = validators.extend(Draft4Validator, {"x-kubernetes-list-map-keys": _distinct})


@cache
def known() -> dict[tuple[str, str], Any]:
    """A validator for each version and kind."""
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        one = msgspec.json.decode(path.read_bytes())
        for version, schema in one["schemas"].items():
            made = closed(schema)
            # Kubernetes' own, which a definition has no schema of.
            made["properties"]["metadata"] = {}
            found[version, one["kind"]] = _Validator(made)
    return found


def is_known(one: Object) -> bool:
    """Is it of a custom kind and version with a definition here?"""
    return (one["apiVersion"], one["kind"]) in known()


def check(one: Object) -> None:
    """Fails for an object of a custom kind that its definition refuses."""
    for error in known()[one["apiVersion"], one["kind"]].iter_errors(one):
        raise AssertionError(
            f"{one['kind']} {one['metadata']['name']}, {error.json_path}: {error.message[:200]}"
        )


if __name__ == "__main__":
    print(msgspec.json.encode(taken(sys.argv[1], sys.stdin.read())).decode())
