"""One setting: its key, flag, environment variable, type, default and description, read from its type's annotations.

A section is a `NamedTuple`; its fields are settings:

    class LogSettings(NamedTuple):
        level: Annotated[Literal["debug", "info"], Meta(description="minimum level")] = "info"

    key log.level, flag --log-level, variable HEADWATER_LOG_LEVEL

`Meta` has the description and the constraints. `Flag`, `Prefix` and `Text` change what follows from the names.

A section that is described itself is one setting, a table: its fields are given together, as NAME=VALUE,… or as a table of a file.
"""

import math
import os
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from headwater.engines.traits import Text


class ConfigError(ValueError):
    """A setting that cannot be used. The message names it, its source, and what to do."""


# Settings.

ENV_PREFIX = "HEADWATER_"

T = TypeVar("T")

_ITEMS = {
    "ALIASES": "NAME",
    "DIRECTORIES": "FOLDER",
    "POLICIES": "POLICY",
    "SEARCH": "WEIGHT",
    "TAINT": "NAME",
}
_TEXTS = {
    "HOST": "HOST",
    "DIR": "FOLDER",
    "FILE": "FILE",
    "TEMPLATE": "FILE",
    "NATS": "URL",
    "MODEL": "MODEL",
}
"""Metavars by the last word of a flag."""

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class Flag(NamedTuple):
    """Annotation of a setting: the name of its flag, without dashes in front. `short`: a letter that an option of a command also has."""

    name: str
    short: str = ""


class Prefix(NamedTuple):
    """Annotation of a section: what its flags begin with, and names that differ from those of its fields.

    `inline`: its keys are those of the section that contains it. `flags`: whole flags by field, as `Flag` has them, and prefixes by section. `group`: its title
    in help, if it is not that of the section that contains it.
    """

    prefix: str = ""
    names: Mapping[str, str] = {}
    inline: bool = False
    flags: Mapping[str, str] = {}
    group: str = ""


class Choices(NamedTuple):
    """Annotation of a text setting: the values that it may have on a command line."""

    names: tuple[str, ...]


class Secret:
    """Annotation of a setting whose value may contain a secret; `mask` hides it."""

    def __init__(self, mask: Callable[[str], str]) -> None:
        self.mask = mask


class Setting(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One setting. `path` are the attributes that lead to it from the tree's root."""

    key: str
    path: tuple[str, ...]
    flag: str
    type: Any
    default: Any
    description: str
    group: str
    text: Text | None = None
    secret: Secret | None = None

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.flag[2:].replace("-", "_").upper()

    @property
    def name(self) -> str:
        """Its name among the parameters of a command."""
        return "__".join(self.path)

    @cached_property
    def fields(self) -> dict[str, "Setting"]:
        """What it has, by name, if it is a table."""
        if self.text is not None or not is_section(self.base):
            return {}
        settings = settings_of(self.base, self.default, key="", group=self.group, how=Prefix())
        return {setting.key.replace(".", "_"): setting for setting in settings}

    @cached_property
    def base(self) -> Any:
        """Its type without constraints and without None."""
        return base_of(self.type)

    @property
    def repeatable(self) -> bool:
        """May it be given several times, each adding to the others?"""
        return get_origin(self.base) is tuple and self.text is None

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it may have, where they are listed."""
        listed = marker(self.type, Choices)
        if listed is not None:
            return listed.names
        inner = get_args(self.base)[0] if self.repeatable else self.base
        inner = base_of(inner)
        return get_args(inner) if get_origin(inner) is Literal else ()

    @property
    def metavar(self) -> str:
        """What stands for its value in help."""
        if self.text is not None and self.text.metavar:
            return self.text.metavar
        if self.fields:
            return "NAME=VALUE,…"
        last = self.flag.rsplit("-", 1)[-1].upper()
        if self.repeatable:
            return f"{_ITEMS.get(last, last.removesuffix('S'))},…"
        if self.choices:
            return "|".join(map(str, self.choices)) if len(self.choices) < 5 else "NAME"
        if self.base is int:
            return last if last in ("PORT", "MIB") else "N"
        if self.base is float:
            is_rate = self.flag.endswith(("-per-s", "-tokens-s"))
            return "SECONDS" if last in ("S", "TIMEOUT") and not is_rate else "X"
        return _TEXTS.get(last) or ("FILE" if "-tls-" in self.flag else "TEXT")

    def read(self, parts: list[Any], source: str, below: Any = None) -> Any:
        """The value of what one source gives: texts, or a file's values. Of a table the rest is that of a weaker source, `below`, or the default.

        Raises `ConfigError` that begins with `source`, such as "--port " or "HEADWATER_PORT=", and the value.
        """
        shown = ",".join(parts) if all(isinstance(part, str) for part in parts) else parts[-1]
        try:
            return checked_finite(self._convert(parts, below))
        except msgspec.MsgspecError as error:
            reason = f"{error}"[:1].lower() + f"{error}"[1:]
            raise ConfigError(f"{source}{shown}: {reason}") from error
        except ValueError as error:
            raise ConfigError(f"{source}{shown}: {error}") from error

    def _convert(self, parts: list[Any], below: Any) -> Any:
        last = parts[-1]
        if self.metavar == "HOST" and last == "":
            raise ValueError(
                "expected a host or an address; 0.0.0.0 stands for all of IPv4, :: for all of IPv6"
            )
        if self.base is str and self.metavar in ("FILE", "FOLDER") and isinstance(last, str):
            # Also where no shell has done it: in a file, after `--flag=`. Without a home it stays.
            last = os.path.expanduser(last)
        if self.base is bool and isinstance(last, str):
            return _boolean(last)
        if self.fields:
            return self._table(parts, self.default if below is None else below)
        if self.text is not None:
            value = self.text.read(last) if isinstance(last, str) else last
            return msgspec.convert(value, self.text.kind or self.type, strict=False)
        if self.choices and not self.repeatable and last not in self.choices:
            raise ValueError(f"choose from {', '.join(self.choices)}")
        if self.repeatable:
            return msgspec.convert([item for part in parts for item in _items(part)], self.type, strict=False)
        return msgspec.convert(last, self.type, strict=False)

    def _table(self, parts: list[Any], below: Any) -> Any:
        """A table with these fields changed, of texts or of a file's table. Raises `ValueError`."""
        values = {}
        for part in parts:
            pairs = named_values(part) if isinstance(part, str) else {} if part is None else part
            if not isinstance(pairs, Mapping):
                raise ValueError(f"expected a table, got a {type(part).__name__}")
            for name, value in pairs.items():
                field = self.fields.get(name)
                if field is None:
                    raise ValueError(f"{name}: names are {', '.join(self.fields)}")
                values[field.path] = field.read([value], f"{name}=")
        return with_values(below, values) if values else below

    def plain(self, value: Any) -> Any:
        """The value as data: a table by its names."""
        return {name: value_at(value, field.path) for name, field in self.fields.items()} or value

    def write(self, value: Any) -> str:
        """The value as `read` takes it; of a table what differs from its default."""
        if self.fields:
            values = ((name, field, value_at(value, field.path)) for name, field in self.fields.items())
            return ",".join(
                f"{name}={field.write(field_value)}"
                for name, field, field_value in values
                if field_value != field.default
            )
        if self.text is not None:
            return self.text.write(value)
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float) and value.is_integer():
            return str(int(value))
        return "" if value is None else str(value)

    def words(self, value: Any) -> list[str]:
        """The value on a command line."""
        if self.base is bool:
            return [self.flag if value else f"--no-{self.flag[2:]}"]
        text = self.write(value)
        # One word where the text could be taken for a flag or for nothing.
        return [f"{self.flag}={text}"] if not text or text.startswith("-") else [self.flag, text]


def named_values(text: str) -> dict[str, str]:
    """Values by name from NAME=VALUE,…; the message of a `ValueError` has the part that is not one."""
    parts = [part.partition("=") for part in text.replace(" ", ",").split(",") if part]
    wrong = next((name for name, equals, _ in parts if not equals), None)
    if wrong is not None:
        raise ValueError(f"{wrong}: give NAME=VALUE")
    return {name: value for name, _, value in parts}


def with_values(base: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    """A section with values by path below it."""
    changed: dict[str, Any] = {}
    for name in {path[0] for path in values}:
        below = {path[1:]: value for path, value in values.items() if path[0] == name}
        changed[name] = below[()] if () in below else with_values(getattr(base, name), below)
    return base._replace(**changed)


def value_at(section: Any, path: tuple[str, ...]) -> Any:
    """The value of a setting in `Settings`, or below it."""
    for name in path:
        section = getattr(section, name)
    return section


def checked_finite(value: T) -> T:
    """`value`, if each number in it is finite. Raises `ValueError`: every comparison with NaN is false, so no range excludes it."""
    numbers = value if isinstance(value, tuple) else (value,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise ValueError("expected a finite number")
    return value


def base_of(kind: Any) -> Any:
    """A type without annotations, and without None."""
    if get_origin(kind) is Annotated:
        return base_of(get_args(kind)[0])
    parts = [part for part in get_args(kind) if part is not type(None)]
    if type(None) in get_args(kind) and len(parts) == 1:
        return base_of(parts[0])
    return kind


def markers(kind: Any) -> tuple[Any, ...]:
    """The annotations of a type."""
    return get_args(kind)[1:] if get_origin(kind) is Annotated else ()


def marker(kind: Any, annotation_type: type[T]) -> T | None:
    """The annotation of this type, if there is one."""
    return next((annotation for annotation in markers(kind) if isinstance(annotation, annotation_type)), None)


def description_of(kind: Any) -> str:
    """The description in a type's annotations."""
    described = (
        annotation.description for annotation in markers(kind) if isinstance(annotation, msgspec.Meta)
    )
    return next((text for text in described if text), "")


def section_type(name: str, fields: Mapping[str, tuple[Any, Any]]) -> Any:
    """A section whose fields, each with its type and its default, are known at run time only."""
    make: Any = namedtuple  # to the checker: only with a literal name
    section = make(name, fields, defaults=[default for _, default in fields.values()])
    section.__annotations__ = {field: kind for field, (kind, _) in fields.items()}
    return section


def is_section(kind: Any) -> bool:
    """Is it a struct whose fields are settings?"""
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def settings_of(
    section: Any, default: Any, *, key: str, group: str, how: Prefix, path: tuple[str, ...] = ()
) -> Iterator[Setting]:
    """The settings of a section, those of the sections in it too. A field without a description is a constant."""
    for name, kind in get_type_hints(section, include_extras=True).items():
        value = getattr(default, name)
        base = base_of(kind)
        if is_section(base) and marker(kind, Text) is None and not description_of(kind):
            inner = marker(kind, Prefix) or Prefix(how.flags.get(name, name))
            below = key if inner.inline else f"{key}.{name}" if key else name
            inner_group = inner.group or group
            yield from settings_of(base, value, key=below, group=inner_group, how=inner, path=(*path, name))
            continue
        if description_of(kind):
            yield setting_of(name, kind, value, key=key, group=group, how=how, path=(*path, name))


def struct_settings(struct: Any, *, group: str = "Options") -> tuple[Setting, ...]:
    """Fields with a description of a struct that is no section of `Settings`: options of a command's own."""
    default = struct()
    return tuple(
        setting_of(name, kind, getattr(default, name), key="", group=group, how=Prefix(), path=(name,))
        for name, kind in get_type_hints(struct, include_extras=True).items()
        if description_of(kind)
    )


def setting_of(
    name: str, kind: Any, default: Any, *, key: str, group: str, how: Prefix, path: tuple[str, ...]
) -> Setting:
    """One setting of a section."""
    flag_marker = marker(kind, Flag) or (Flag(how.flags[name]) if name in how.flags else None)
    name = how.names.get(name, name.replace("_", "-"))
    flag = flag_marker.name if flag_marker is not None else f"{how.prefix}-{name}" if how.prefix else name
    return Setting(
        key=f"{key}.{name.replace('-', '_')}" if key else name.replace("-", "_"),
        path=path,
        flag=f"--{flag}",
        type=kind,
        default=default,
        description=description_of(kind),
        group=group,
        text=marker(kind, Text),
        secret=marker(kind, Secret),
    )


def _items(given: Any) -> list[Any]:
    """The items of a list: of a text with commas, or of a file's value, which may be a single one."""
    if isinstance(given, str):
        return [word.strip() for word in given.split(",") if word.strip()]
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError(f"expected {' or '.join((_TRUE[0], _FALSE[0]))}")
    return word in _TRUE


# The folder of caches: routers' newest snapshots and workers' adapters.

NOWHERE = "none"


def cache_folder(setting: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that `--cache-dir` names, or the one of the XDG base directories. None for nowhere."""
    if setting:
        return None if setting == NOWHERE else Path(setting)
    base = environ.get("XDG_CACHE_HOME", "")
    # The specification: a relative path there is invalid and ignored.
    if os.path.isabs(base):
        return Path(base) / "headwater"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "headwater" if os.path.isabs(home) else None
