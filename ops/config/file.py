"""A configuration file, TOML or YAML: settings by section, and tables of an engine's own arguments."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from headwater.ops.config.errors import ConfigError
from headwater.ops.config.tree import SECTION_TYPES, all_settings, nearest_key

ENGINES: Final = "engines"
"""The table that contains no settings: engines' own arguments, under any key."""


class ConfigFile:
    """A file's document, its keys checked. Raises `ConfigError` naming the file."""

    def __init__(self, path: Path, key: str = "", source: str = "--config ") -> None:
        """`key`: the table of native engine arguments that this process uses. `source`: what gave the path, for errors."""
        self.path = path
        self._document = _read(path, source)
        # Tables that a key names contain an engine's arguments, for the process that selects them.
        self._tables = {ENGINES, key.partition(".")[0]}
        self.values = dict(self._settings(self._document, ""))

    def _settings(self, table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        known = all_settings()
        for name, value in table.items():
            key = f"{prefix}{name}"
            if key in known:
                yield key, value
            elif key in self._tables:
                continue
            elif value is None and any(one.startswith(f"{key}.") for one in known):
                # All its keys are comments.
                continue
            elif isinstance(value, dict) and any(one.startswith(f"{key}.") for one in known):
                yield from self._settings(value, f"{key}.")
            else:
                raise ConfigError(f"{self.path}: unknown setting {key}{_hint(key, value)}")

    def engine_arguments(self, key: str) -> tuple[str, ...]:
        """The table at a dotted key, as words of the engine's command line. Raises `ConfigError` naming both."""
        from headwater.engines import native_arguments
        from headwater.engines.engine import EngineUnavailable

        found: Any = self._document
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                there = ", ".join(_tables(self._document)) or "none at all"
                raise ConfigError(f"--config-key {key}: {self.path} has no such table; it has {there}")
            found = found[part]
        if not isinstance(found, dict):
            raise ConfigError(f"--config-key {key}: {self.path} has a value there, not a table of arguments")
        try:
            return native_arguments.tokens_of(found, f"{self.path}, table {key}")
        except EngineUnavailable as error:
            raise ConfigError(str(error)) from error


def _hint(key: str, value: Any) -> str:
    near = nearest_key(key)
    if near and near.rpartition(".")[2] != key:
        return f"; did you mean {near}?"
    if near and "." in near:
        section, _, name = near.rpartition(".")
        return f"; it is {near}: write {name} in the table [{section}]"
    kind = "sections" if isinstance(value, dict) else "sections and settings"
    return f"; {kind} are {', '.join(SECTION_TYPES)}"


def _read(path: Path, source: str) -> dict[str, Any]:
    import yaml

    try:
        # Whatever the locale says; some editors begin files with a byte order mark.
        text = path.read_bytes().decode("utf-8-sig")
        is_yaml = path.suffix.lower() in (".yaml", ".yml")
        document = _load_yaml(text) if is_yaml else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{source}{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}{path}: {' '.join(str(error).split())}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{source}{path}: expected settings by name, got a {type(document).__name__}")
    return document


def _load_yaml(text: str) -> Any:
    """A document of which no table has a key twice: YAML's last one would win unnoticed, and TOML refuses it too."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
                    continue
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
            made: dict[Any, Any] = super().construct_mapping(node, deep)
            return made

    return yaml.load(text, Loader)


def _tables(document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield f"{prefix}{name}"
            yield from _tables(value, f"{prefix}{name}.")
