"""The capabilities of an engine class, computed from its optional methods."""

from typing import Any, Final, get_args

from headwater.engines.engine import Aborts, EngineUnavailable
from headwater.schemas.messages.handoff import Choreography
from headwater.schemas.tables.capability import HINTS, NEEDS, Capability

METHODS: Final[dict[tuple[str, ...], tuple[Capability, ...]]] = {
    ("embed",): ("embed",),
    ("generate_images",): ("image_generation",),
    ("generate_video",): ("video_generation",),
    ("load_lora", "unload_lora"): ("lora",),
    ("prefill", "release"): ("handoff",),
    ("sleep", "wake"): ("sleep",),
    ("pause", "resume"): ("pause",),
    ("profile",): ("profile",),
    ("kv_events",): ("kv_events", "kv_dump"),
    ("clear_kv",): ("clear_kv",),
}
"""Optional methods, and what a class that defines them can do. Those of one row belong together."""

EDITS: Final[frozenset[Capability]] = frozenset({"image_edits"})
"""A field of the requests of `generate_images`."""

FEATURES: Final[frozenset[Capability]] = (HINTS | EDITS | {need.capability for need in NEEDS}) - {
    capability for row in METHODS.values() for capability in row
}
"""Capabilities that are fields of a request and not methods: a class lists those it honours as `features`."""


def declared_capabilities(kind: Any) -> frozenset[Capability]:
    """What a class with the two methods can do. Raises `EngineUnavailable` for a declaration that is not whole."""
    found: set[Capability] = {"generate"}
    for methods, capabilities in METHODS.items():
        defined = [method for method in methods if callable(getattr(kind, method, None))]
        if not defined:
            continue
        if len(defined) < len(methods):
            missing = next(method for method in methods if method not in defined)
            raise EngineUnavailable(f"{kind.__name__} defines {defined[0]} but not {missing}: define both")
        found.update(capabilities)
    features = frozenset(getattr(kind, "features", ()))
    if unknown := sorted(features - FEATURES):
        raise EngineUnavailable(
            f"{kind.__name__}.features: {unknown[0]!r} is none of {', '.join(sorted(FEATURES))}; "
            "other capabilities are declared by defining their methods"
        )
    for field, values, default in (("choreography", Choreography, "returned"), ("aborts", Aborts, "anytime")):
        value = getattr(kind, field, default)
        if value not in get_args(values):
            raise EngineUnavailable(
                f"{kind.__name__}.{field}: {value!r} is none of {', '.join(get_args(values))}"
            )
    return frozenset(found | features)
