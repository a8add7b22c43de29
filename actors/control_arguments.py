"""What each control command takes, and errors that name the argument."""

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec

from headwater.engines.engine import PauseMode
from headwater.schemas.control import Command
from headwater.schemas.fleet import Role

Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
AdapterName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TaintName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]

DRAIN_S = 30.0


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No arguments."""


class Sleep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What still runs after `within_s` is aborted here and goes on elsewhere."""

    level: Literal[1, 2] = 1
    within_s: Seconds = DRAIN_S


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mode wait: what still runs after `within_s` is aborted here and goes on elsewhere."""

    mode: PauseMode = "wait"
    within_s: Seconds = DRAIN_S


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`within_s` as for sleep; without it what runs may take as long as it does."""

    within_s: Seconds | None = None


class ToRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The role from now on."""

    role: Role


class LoadLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name that clients use, and where the adapter is."""

    name: AdapterName
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class UnloadLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which adapter; `forget`: everywhere, so that no request loads it again."""

    name: AdapterName
    forget: bool = False


class Taint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request must tolerate to come here."""

    name: TaintName


Arguments = Nothing | Sleep | Pause | Drain | ToRole | LoadLora | UnloadLora | Taint

TAKES: dict[Command, type[Any]] = {
    "sleep": Sleep,
    "pause": Pause,
    "drain": Drain,
    "stop": Drain,
    "role": ToRole,
    "load-lora": LoadLora,
    "unload-lora": UnloadLora,
    "taint": Taint,
    "untaint": Taint,
}
"""Commands with arguments; the others take none."""

_FIELD = re.compile(r"\$\.(\w+)")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


class WrongArguments(ValueError):
    """The message names the command, the argument and what it takes."""


def parse(command: Command, arguments: dict[str, Any]) -> Arguments:
    """The command's arguments. Raises `WrongArguments`."""
    kind = TAKES.get(command, Nothing)
    try:
        parsed: Arguments = msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        raise WrongArguments(f"{command}: {_told(kind, str(error))}") from error
    return parsed


def _told(kind: type[Any], error: str) -> str:
    takes = ", ".join(kind.__struct_fields__) or "none"
    if found := _UNKNOWN.search(error):
        return f"there is no argument {found[1]!r}; it takes {takes}"
    if found := _MISSING.search(error):
        return f"argument {found[1]!r} is missing"
    where = _FIELD.search(error)
    what = error.partition(" - at ")[0]
    return f"argument {where[1]!r}: {what}" if where else what


def without_secrets(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same for the log: of URLs neither user, password nor query (signed URLs carry their secret there)."""
    return {name: _bare(value) if isinstance(value, str) else value for name, value in arguments.items()}


def _bare(value: str) -> str:
    if "://" not in value:
        return value
    try:
        parts = urlsplit(value)
    except ValueError:
        return "(unreadable URL)"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
