"""The arguments of each control command, and errors that name the argument."""

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec

from headwater.engines.engine import PauseMode
from headwater.schemas.events.fleet import Role
from headwater.schemas.messages.control import Command

Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
LoraName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TaintName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]

DRAIN_S = 30.0


class NoArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command without arguments."""


class Sleep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests still in flight after `within_s` seconds are aborted and migrate."""

    level: Literal[1, 2] = 1
    within_s: Seconds = DRAIN_S


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mode wait: requests still in flight after `within_s` seconds are aborted and migrate."""

    mode: PauseMode = "wait"
    within_s: Seconds = DRAIN_S


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`within_s` as for sleep; None: no limit."""

    within_s: Seconds | None = None


class ToRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The new role."""

    role: Role


class LoadLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name that clients use, and the source to load the adapter from."""

    name: LoraName
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class UnloadLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which adapter; `forget`: on all workers, and its card is deleted, so that no request loads it again."""

    name: LoraName
    forget: bool = False


class Taint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A taint: the router sends only requests that tolerate it."""

    name: TaintName


Arguments = NoArguments | Sleep | Pause | Drain | ToRole | LoadLora | UnloadLora | Taint

ARGUMENTS: dict[Command, type[Any]] = {
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
"""By command; commands that are not listed take no arguments."""

_FIELD = re.compile(r"\$\.(\w+)")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


class WrongArguments(ValueError):
    """The message names the command, the argument and the valid values."""


def parse(command: Command, arguments: dict[str, Any]) -> Arguments:
    """The command's arguments. Raises `WrongArguments`."""
    kind = ARGUMENTS.get(command, NoArguments)
    try:
        parsed: Arguments = msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        raise WrongArguments(f"{command}: {_describe(kind, str(error))}") from error
    return parsed


def _describe(kind: type[Any], error: str) -> str:
    takes = ", ".join(kind.__struct_fields__) or "none"
    if found := _UNKNOWN.search(error):
        return f"there is no argument {found[1]!r}; it takes {takes}"
    if found := _MISSING.search(error):
        return f"argument {found[1]!r} is missing"
    where = _FIELD.search(error)
    what = error.partition(" - at ")[0]
    return f"argument {where[1]!r}: {what}" if where else what


def without_secrets(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments for the log: URLs without user, password and query (signed URLs carry their secret there)."""
    return {
        name: _without_secret(value) if isinstance(value, str) else value for name, value in arguments.items()
    }


def _without_secret(value: str) -> str:
    if "://" not in value:
        return value
    try:
        parts = urlsplit(value)
    except ValueError:
        return "(unreadable URL)"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
