"""Route queries and decisions from flat fields: each goes where the schema has it."""

from typing import Any, TypeVar

import msgspec

from headwater.schemas.routing import Constraints, Decision, FlowControl, Preferences, RouteQuery

Routed = TypeVar("Routed", RouteQuery, Decision)

PARTS: dict[str, type[msgspec.Struct]] = {
    "constraints": Constraints,
    "preferences": Preferences,
    "flow": FlowControl,
}


def route_query(
    request: str, prompt_tokens: int = 16, max_tokens: int = 10, hashes: bytes = b"", **fields: Any
) -> RouteQuery:
    """A query; `fields` are those of its constraints, preferences and flow control."""
    return changed(RouteQuery(request, prompt_tokens, max_tokens, hashes), **fields)


def changed(original: Routed, **fields: Any) -> Routed:
    """The query or decision with some fields changed, wherever they are."""
    own = {name: fields.pop(name) for name in original.__struct_fields__ if name in fields}
    for part, kind in PARTS.items():
        inner = {name: fields.pop(name) for name in kind.__struct_fields__ if name in fields}
        # `pairs_with` is a constraint of a query and a result of a decision.
        if inner and part in original.__struct_fields__:
            own[part] = msgspec.structs.replace(own.get(part, getattr(original, part)), **inner)
    assert not fields, f"unknown fields: {sorted(fields)}"
    return msgspec.structs.replace(original, **own)
