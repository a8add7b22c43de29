"""Events of the log, from `schemas/events`."""

import importlib
import inspect
import pkgutil

import headwater.schemas.events as package
from docs._reference.markdown import doc, table
from docs._reference.structs import fields
from headwater.schemas import constraints, encoding
from headwater.schemas import encoding as schemas_encoding

_ORDER = ("fleet", "kv", "load", "route", "request", "digest")
_HEAD = """
# Events

Events are MessagePack arrays: the fields in this order, after the tag. Fields at the end that have a default may be missing in messages of older
versions. New fields are only appended; another shape is a new tag with an upcast ([log](../concepts/log.md#evolution)).

## Envelope
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, doc(encoding), "", *_structs(encoding)]
    for name in sorted((m.name for m in pkgutil.iter_modules(package.__path__)), key=_place):
        module = importlib.import_module(f"{package.__name__}.{name}")
        found = list(_structs(module))
        if found:
            parts += [f"## `schemas/events/{name}.py`", _block(doc(module)), *found]
    parts += ["## `schemas/constraints.py`", _block(doc(constraints)), *_structs(constraints)]
    parts += ["## Retired shapes", _block(doc(schemas_encoding))]
    return "\n\n".join(parts)


def _place(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def _block(text: str) -> str:
    """A docstring; one with a drawing in it as it stands."""
    return f"```text\n{text}\n```" if "──" in text or "\n    " in text else text


def _structs(module: object) -> list[str]:
    found = []
    for name, value in vars(module).items():
        own = inspect.isclass(value) and value.__module__ == getattr(module, "__name__", "")
        if own and hasattr(value, "__struct_config__"):
            tag = value.__struct_config__.tag
            title = f"### {name}" + (f" (`{tag}`)" if isinstance(tag, str) else "")
            rows = fields(value)
            shown = table(("field", "type", "default"), rows) if rows else "No fields.\n"
            found.append(f"{title}\n\n{doc(value)}\n\n{shown}")
    return found
