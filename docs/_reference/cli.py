"""Command line and settings."""

from headwater.ops.commands import config

_CLI_HEAD = """
# Command line

`headwater COMMAND --help` prints the same. Settings may also come from the environment or a file: see [settings](settings.md).
"""
_SETTINGS_HEAD = """
# Settings

Sources, strongest first: flag, environment variable, configuration file (`--config FILE`, TOML or YAML), default. In a file, a
key is a name in a table: `http.port` is `port` in `[http]`. `--config-key` names a table of vLLM's own arguments in it.
The variables `HEADWATER_CONFIG` and `HEADWATER_CONFIG_KEY` do the same. `headwater config show` prints every value with its origin.
"""


def commands() -> str:
    """Every command with its arguments and flags."""
    return f"{_CLI_HEAD}\n{config.commands_markdown()}"


def settings() -> str:
    """Every setting with its key, flag, variable, values and default."""
    return f"{_SETTINGS_HEAD}\n{config.settings_markdown()}"
