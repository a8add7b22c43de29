"""Events of the log, and commands whose outcome is an event, from `schemas`."""

import inspect

from docs._reference.markdown import doc, table
from docs._reference.structs import fields
from headwater.schemas import control, encoding, events, routing

_HEAD = """
# Events

Events are MessagePack arrays: the fields in this order, after the tag. Fields at the end that have a default may be missing in messages of older
versions. New fields are only appended; another shape is a new tag with an upcast ([log](../concepts/log.md#evolution)).

## Envelope
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, doc(encoding), "", *_structs(encoding)]
    for module in (events, routing, control):
        name = module.__name__.removeprefix("headwater.").replace(".", "/")
        parts += [f"## `{name}.py`", _blocks(doc(module)), *_structs(module)]
    parts += ["## Retired shapes", _block(doc(encoding))]
    return "\n\n".join(parts)


def _blocks(text: str) -> str:
    """A docstring, each paragraph by itself."""
    return "\n\n".join(_block(part) for part in text.split("\n\n"))


def _block(text: str) -> str:
    """A docstring; one with a drawing in it as it stands."""
    return f"```text\n{text}\n```" if "──" in text or "\n    " in text else text


def _structs(module: object) -> list[str]:
    found = []
    for name, value in vars(module).items():
        own = inspect.isclass(value) and value.__module__ == getattr(module, "__name__", "")
        if own and value is not events.Event and hasattr(value, "__struct_config__"):
            tag = value.__struct_config__.tag
            title = f"### {name}" + (f" (`{tag}`)" if isinstance(tag, str) else "")
            rows = fields(value)
            shown = table(("field", "type", "default"), rows) if rows else "No fields.\n"
            found.append(f"{title}\n\n{doc(value)}\n\n{shown}")
    return found
