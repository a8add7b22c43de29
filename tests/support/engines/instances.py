"""An instance of a JSON schema: what an engine with guided decoding answers, whatever its model."""

from typing import Any

DEPTH_MAX = 16


def instance_of(schema: Any, root: Any = None, depth: int = 0) -> Any:
    """A small value that conforms to a schema made of the keywords that clients of structured output send."""
    root = schema if root is None else root
    assert depth < DEPTH_MAX, "a schema that is not recursive in its required parts"
    if not isinstance(schema, dict):
        return {}
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "$ref" in schema:
        found = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        return instance_of(found, root, depth + 1)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return instance_of(schema[keyword][0], root, depth + 1)
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        wanted = schema.get("required", list(properties))
        return {name: instance_of(properties.get(name, {}), root, depth + 1) for name in wanted}
    if kind == "array":
        items = schema.get("items", schema.get("prefixItems", [{}])[0])
        return [instance_of(items, root, depth + 1) for _ in range(max(1, schema.get("minItems", 1)))]
    smallest = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
    return {"string": "Paris", "integer": smallest, "number": smallest, "boolean": True, "null": None}[kind]
