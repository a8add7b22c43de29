"""Reading a configuration file, TOML or YAML: settings by name, and tables of an engine's own arguments by key."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from headwater.engines.engine import EngineUnavailable
from headwater.engines.vllm import native

SECTIONS = "engines"
"""The table whose content is no settings: engines' arguments, by any key below it."""


class ConfigError(ValueError):
    """A setting that can not be used; the message names it, its source and what it takes."""


def read(path: Path) -> dict[str, Any]:
    """The document in a file. Raises `ConfigError` naming the file."""
    try:
        text = path.read_text()
        is_yaml = path.suffix.lower() in (".yaml", ".yml")
        document = yaml.safe_load(text) if is_yaml else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"--config {path}: it holds no settings by name, but a {type(document).__name__}")
    return document


def section(document: Mapping[str, Any], key: str, path: str) -> tuple[str, ...]:
    """The table at a key with dots, as words of the engine's command line. Raises `ConfigError` naming both."""
    found: Any = document
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            there = ", ".join(_tables(document)) or "none at all"
            raise ConfigError(f"--config-key {key}: {path} has no such table; it has {there}")
        found = found[part]
    if not isinstance(found, dict):
        raise ConfigError(f"--config-key {key}: in {path} that is a value and no table of arguments")
    try:
        return native.tokens_of(found, f"{path}, table {key}")
    except EngineUnavailable as error:
        raise ConfigError(str(error)) from error


def _tables(document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield f"{prefix}{name}"
            yield from _tables(value, f"{prefix}{name}.")
