"""Where values come from: flags, then the environment, then a file, then defaults.

cyclopts reads flags and variables; `Sources` is its last source and adds the file and the engine's own arguments.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cyclopts import UNSET, App, Argument, ArgumentCollection, Token

from headwater.ops.config.environment import CONFIG_VARIABLE, is_unset
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.file import ConfigFile
from headwater.ops.config.setting import Setting
from headwater.ops.config.tree import all_settings

CONFIG, CONFIG_KEY = "config", "config_key"
"""Parameters that every command with settings has."""

ENGINE = "worker__engine"

NATIVE = {"vllm": "vllm.native", "sglang": "sglang.native"}
"""The setting of each engine's own arguments."""

ARGUMENTS = {"engine_name": "worker.engine"}
"""Positional arguments of commands that stand for a setting, which then needs no flag."""


class ValueOrigin(NamedTuple):
    """Where a value comes from: `where` is the flag, the variable, or the file and key."""

    source: Literal["flag", "environment", "file"]
    where: str


class Sources:
    """The last source of one command line, and a record of where each value comes from.

    `native` are the words after `--`.
    """

    def __init__(self, native: Sequence[str] = ()) -> None:
        self.origins: dict[str, ValueOrigin] = {}
        self._native = tuple(native)

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Add to what flags and environment have given."""
        by_name = {argument.field_info.name: argument for argument in arguments}
        for given in by_name.values():
            given.tokens[:] = [token for token in given.tokens if not _is_unset(token)]
        _replace_flags(by_name)
        path, key = _given(by_name.get(CONFIG)), _given(by_name.get(CONFIG_KEY))
        if key and not path:
            raise ConfigError(f"--config-key {key}: give the file with --config FILE")
        source = f"{CONFIG_VARIABLE}=" if _is_variable(by_name.get(CONFIG)) else "--config "
        file = ConfigFile(Path(os.path.expanduser(path)), key, source) if path else None
        for setting in all_settings().values():
            argument = by_name.get(setting.name)
            if argument is None:
                continue
            if argument.tokens:
                self.origins[setting.key] = _origin(argument.tokens[0])
            elif file is not None and setting.key in file.values:
                where = f"{file.path}: {setting.key}"
                value = setting.read([file.values[setting.key]], f"{where} = ")
                argument.tokens.append(Token(keyword=where, source="file", implicit_value=value))
                self.origins[setting.key] = ValueOrigin("file", where)
        engine = _given(by_name.get(ENGINE))
        setting = all_settings()[NATIVE.get(engine, NATIVE["vllm"])]
        native = by_name.get(setting.name)
        if native is not None:
            self._add_native(setting, native, file.engine_arguments(key) if file is not None and key else ())
        elif self._native:
            raise ConfigError(
                f"headwater {' '.join(commands)}: takes no engine arguments: nothing may follow `--`"
            )

    def _add_native(self, setting: Setting, argument: Argument, section: tuple[str, ...]) -> None:
        """Join an engine's arguments of all sources, the strongest last: its parser lets the last word win."""
        if not section and not self._native:
            return
        words = self._native
        if words and not words[0].startswith("-"):
            # As in `vllm serve MODEL`.
            words = ("--model", *words)
        own: tuple[str, ...] = ()
        if argument.tokens:
            own = read_tokens(setting, argument.tokens)
        self.origins[setting.key] = (
            ValueOrigin("flag", "--") if self._native else ValueOrigin("file", "--config-key")
        )
        argument.tokens[:] = [Token(keyword="--", source="cli", implicit_value=(*section, *own, *words))]


def read_tokens(setting: Setting, tokens: Sequence[Token]) -> Any:
    """The value of tokens of one source. Raises `ConfigError` naming the flag or variable."""
    first = tokens[0]
    if first.implicit_value is not UNSET:
        return first.implicit_value
    source = f"{first.keyword}=" if first.source == "env" else f"{first.keyword or setting.flag} "
    return setting.read([token.value for token in tokens], source)


def _replace_flags(by_name: dict[str, Argument]) -> None:
    """Give each positional argument's value to its setting. Raises `ConfigError` if a flag says something else."""
    for name, key in ARGUMENTS.items():
        argument = by_name.get(name)
        if argument is None or not argument.tokens:
            continue
        setting, word = all_settings()[key], argument.tokens[0].value
        own = by_name[setting.name]
        if own.tokens and own.tokens[0].source == "cli" and own.tokens[0].value != word:
            raise ConfigError(
                f"{word} and {setting.flag} {own.tokens[0].value} contradict each other: give one"
            )
        own.tokens[:] = [Token(keyword=setting.flag, value=word, source="cli")]


def _is_unset(token: Token) -> bool:
    return token.source == "env" and is_unset(token.keyword or "", token.value)


def _given(argument: Argument | None) -> str:
    if argument is None or not argument.tokens:
        return ""
    # Of a file it is a value already.
    token = argument.tokens[0]
    return token.value or (token.implicit_value if isinstance(token.implicit_value, str) else "")


def _is_variable(argument: Argument | None) -> bool:
    return argument is not None and bool(argument.tokens) and argument.tokens[0].source == "env"


def _origin(token: Token) -> ValueOrigin:
    return ValueOrigin("environment" if token.source == "env" else "flag", token.keyword or "")
