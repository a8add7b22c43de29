"""`headwater config`: settings of a command and their origins, and the reference of commands and settings, generated from their types."""

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import groupby
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from cyclopts import App, Parameter
from msgspec import Meta

from headwater.ops.commands import COMMANDS, place_of
from headwater.ops.config.command import AnyWord, Bound, Command, Json, command, group, setting_value
from headwater.ops.config.processes import SECTION_TYPES, settings_below
from headwater.ops.config.setting import ConfigError, Flag, Setting, base_of
from headwater.ops.config.sources import ValueOrigin
from headwater.ops.terminal import table


def _shown(
    command: Command, bound: Bound, origins: Mapping[str, ValueOrigin]
) -> Iterator[tuple[str, Any, str, str]]:
    """All settings of a command: key, value, the value as text, and its origin. Secrets are masked."""
    for one in command.settings:
        value = setting_value(bound, one)
        if one.secret is not None:
            value = one.secret.mask(value)
        origin = origins.get(one.key)
        yield one.key, one.plain(value), one.write(value), " ".join(origin) if origin else "default"


class CommandDoc(NamedTuple):
    """A command: its title in help, its description, and (argument, meaning) of each argument and flag."""

    name: str
    group: str
    text: str
    arguments: list[tuple[str, str]]


def commands() -> Iterator[tuple[str, str, Command | App]]:
    """(group, name, command) of all commands; those with commands below them are `App`s."""
    for package, (title, names) in COMMANDS.items():
        for name in names:
            module, attribute = place_of(package, name)
            yield title, name, getattr(import_module(module), attribute)


def command_docs() -> list[CommandDoc]:
    """Every command, those below others after them."""
    docs = []
    for title, name, declared_command in commands():
        if isinstance(declared_command, Command):
            docs.append(_doc(name, title, declared_command))
            continue
        if declared_command.default_command is not None:
            docs.append(_doc(name, title, declared_command.default_command))
        for below in declared_command:
            inner = declared_command[below].default_command
            if isinstance(inner, Command):
                docs.append(_doc(f"{name} {below}", title, inner))
    return docs


def _doc(name: str, group: str, command: Any) -> CommandDoc:
    return CommandDoc(
        name,
        group,
        command.__doc__,
        [_argument(parameter) for parameter in inspect.signature(command).parameters.values()],
    )


def _argument(parameter: inspect.Parameter) -> tuple[str, str]:
    kind, *annotations = get_args(parameter.annotation)
    details = next(annotation for annotation in annotations if isinstance(annotation, Parameter))
    if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
        shown = next(iter(details.name or (parameter.name.upper(),)))
        return (f"{shown}…" if parameter.kind is parameter.VAR_POSITIONAL else shown), details.help or ""
    flag = next(iter(details.name or (f"--{parameter.name.replace('_', '-')}",)))
    if base_of(kind) is bool:
        shown = f"{flag}, {next(iter(details.negative))}" if details.negative else flag
    else:
        shown = f"{flag} {details.metavar or ''}".strip()
    return shown, details.help or ""


def setting_docs() -> list[dict[str, Any]]:
    """Every setting as plain data: section, key, flag, variable, values, default, description, fields of a table, commands that use it."""
    users: dict[str, list[str]] = {}
    for _, name, registered in commands():
        for setting in registered.settings if isinstance(registered, Command) else ():
            users.setdefault(setting.key, []).append(name)
    return [
        {
            "section": setting.group,
            "key": setting.key,
            "flag": setting.flag,
            "variable": setting.variable,
            **_values(setting),
            "fields": [{"name": name, **_values(field)} for name, field in setting.fields.items()],
            "commands": users.get(setting.key, []),
        }
        for name in SECTION_TYPES
        for setting in settings_below(name)
    ]


def _values(setting: Setting) -> dict[str, str]:
    values = "true|false" if setting.base is bool else setting.metavar
    return {"values": values, "default": setting.write(setting.default), "description": setting.description}


def settings_markdown() -> str:
    """A table per section, and one for each setting that is a table itself."""
    lines: list[str] = []
    for section, settings in groupby(setting_docs(), lambda setting: setting["section"]):
        lines += ["", f"## {section}", ""]
        shown = list(settings)
        lines += _table(shown, ("key", "flag", "variable", "values", "default"))
        for setting in shown:
            if setting["fields"]:
                lines += ["", f"Names of `{setting['key']}`:", ""]
                lines += _table(setting["fields"], ("name", "values", "default"))
    return "\n".join(lines).strip() + "\n"


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> Iterator[str]:
    yield _row(*columns, "meaning")
    yield "|---" * (len(columns) + 1) + "|"
    for row in rows:
        yield _row(*(_code(row[name]) for name in columns), row["description"])


def commands_markdown() -> str:
    """A section per command, with a table of its arguments and flags."""
    lines: list[str] = []
    for doc in command_docs():
        lines += ["", f"## {doc.name}", "", *_text(doc.text)]
        if doc.arguments:
            lines += ["", "| argument | meaning |", "|---|---|"]
            lines += [_row(_code(argument), meaning) for argument, meaning in doc.arguments]
    return "\n".join(lines).strip() + "\n"


def _text(text: str) -> list[str]:
    """A description: indented lines are a block of their own."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        lines += (
            ["```text", *(line.strip() for line in paragraph.splitlines()), "```", ""]
            if paragraph.startswith("  ")
            else [paragraph, ""]
        )
    return lines[:-1]


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@command
def show(
    *flags: Annotated[str, AnyWord(), Meta(description="flags of that command")],
    of: Annotated[str, Flag("command"), Meta(description="command whose settings are shown")] = "up",
    as_json: Json = False,
) -> int:
    """Print every setting of a command, its value and the origin of the value: default, file, environment or flag.

    For example: headwater config show --command router --config fleet.toml --policy random
    """
    from headwater.ops.commands.application import parse

    shown_command = next((candidate for _, name, candidate in commands() if name == of), None)
    if not isinstance(shown_command, Command):
        names = ", ".join(
            name for _, name, candidate in commands() if isinstance(candidate, Command) and candidate.settings
        )
        raise ConfigError(f"--command {of}: choose from {names}")
    bound, sources = parse([of, *flags])
    rows = list(_shown(shown_command, bound, sources.origins))
    if as_json:
        data = [{"key": key, "value": value, "origin": origin} for key, value, _, origin in rows]
        print(msgspec.json.encode(data).decode())
    else:
        print(
            table(
                ("setting", "value", "origin"), [(key, text or "-", origin) for key, _, text, origin in rows]
            )
        )
    return 0


@command
def reference(
    what: Annotated[Literal["settings", "commands"], Meta(description="what to describe")] = "settings",
    *,
    form: Annotated[
        Literal["markdown", "json"], Flag("format"), Meta(description="output format")
    ] = "markdown",
) -> int:
    """Print the reference of all settings, or of all commands."""

    if form == "json":
        if what != "settings":
            raise ConfigError("--format json is for settings")
        print(msgspec.json.encode(setting_docs()).decode())
    else:
        text = settings_markdown() if what == "settings" else commands_markdown()
        print(text, end="")
    return 0


config = group("config", None, show=show, reference=reference)
