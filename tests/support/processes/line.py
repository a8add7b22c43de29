"""Command lines in tests: what they mean, without running them."""

import shlex
from typing import Any

from headwater.ops.commands.application import parse


def arguments(line: str | list[str]) -> dict[str, Any]:
    """The arguments that a command's function gets."""
    return parse(shlex.split(line) if isinstance(line, str) else line)[0].arguments


def settings_of(*line: str) -> Any:
    """The settings that a command line means."""
    return arguments(list(line))["settings"]
