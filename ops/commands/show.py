"""Settings and their origins, as text or as data."""

from typing import Any, NamedTuple

from headwater.ops.config.command import Bound, Command, setting_value
from headwater.ops.config.sources import ValueOrigin
from headwater.ops.process.text_table import table


class Shown(NamedTuple):
    """One setting of a command: its value, also as text, and the origin of it. Secrets are masked."""

    key: str
    value: Any
    text: str
    origin: str


def shown(command: Command, bound: Bound, origins: dict[str, ValueOrigin]) -> list[Shown]:
    """All settings of a command."""
    found = []
    for one in command.settings:
        value = setting_value(bound, one)
        if one.secret is not None:
            value = one.secret.mask(value)
        origin = origins.get(one.key)
        where = f"{origin.source} {origin.where}" if origin else "default"
        found.append(Shown(one.key, one.plain(value), one.write(value), where))
    return found


def as_text(settings: list[Shown]) -> str:
    """A table with a line per setting."""
    rows = [(one.key, one.text or "-", one.origin) for one in settings]
    return table(("setting", "value", "origin"), rows)


def as_data(settings: list[Shown]) -> list[dict[str, Any]]:
    """Key, value and origin of each."""
    return [{"key": one.key, "value": one.value, "origin": one.origin} for one in settings]
