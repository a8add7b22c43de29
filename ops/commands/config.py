"""`headwater config`: settings and their origins, and their reference."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headwater.ops.config.command import AnyWord, command, group
from headwater.ops.config.setting import ConfigError, Flag


@command
def show(
    *flags: Annotated[str, AnyWord(), Meta(description="flags of that command")],
    of: Annotated[str, Flag("command"), Meta(description="command whose settings are shown")] = "up",
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON")] = False,
) -> int:
    """Print every setting of a command, its value and the origin of the value: default, file, environment or flag.

    For example: headwater config show --command router --config fleet.toml --policy random
    """
    from headwater.ops.commands.application import parse
    from headwater.ops.commands.reference import commands
    from headwater.ops.commands.show import as_data, as_text, shown
    from headwater.ops.config.command import Command

    found = next((one for _, name, one in commands() if name == of), None)
    if not isinstance(found, Command):
        names = ", ".join(name for _, name, one in commands() if isinstance(one, Command) and one.settings)
        raise ConfigError(f"--command {of}: choose from {names}")
    bound, sources = parse([of, *flags])
    settings = shown(found, bound, sources.origins)
    if as_json:
        print(msgspec.json.encode(as_data(settings)).decode())
    else:
        print(as_text(settings))
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
    from headwater.ops.commands import reference as documents

    if form == "json":
        if what != "settings":
            raise ConfigError("--format json is for settings")
        print(msgspec.json.encode(documents.setting_docs()).decode())
    else:
        made = documents.settings_markdown() if what == "settings" else documents.commands_markdown()
        print(made, end="")
    return 0


config = group("config", None, show=show, reference=reference)
