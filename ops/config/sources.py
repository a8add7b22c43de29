"""Sources of values: flags, then the environment, then a file, then defaults.

cyclopts reads flags and variables; `Sources` is its last source and adds the file and the engine's own arguments. Its own sources of
files are not used: each process knows a part of the keys of one file, and a key that no process knows is an error that names the nearest
one; so is a key that YAML has twice, while a section whose keys are all comments is none.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from cyclopts import UNSET, App, Argument, ArgumentCollection, Token

from headwater.engines import registry
from headwater.ops.config.processes import all_settings, nearest_key
from headwater.ops.config.setting import ENV_PREFIX, ConfigError, Setting
from headwater.ops.config.worker import section_of

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
        settings = all_settings()
        for name, value in table.items():
            key = f"{prefix}{name}"
            if key in settings:
                yield key, value
            elif key in self._tables:
                continue
            elif value is None and any(known_key.startswith(f"{key}.") for known_key in settings):
                # All its keys are comments.
                continue
            elif isinstance(value, dict) and any(known_key.startswith(f"{key}.") for known_key in settings):
                yield from self._settings(value, f"{key}.")
            else:
                raise ConfigError(f"{self.path}: unknown setting {key}{_hint(key, value)}")

    def engine_arguments(self, key: str) -> tuple[str, ...]:
        """The table at a dotted key, as words of the engine's command line. Raises `ConfigError` naming both."""
        from headwater.engines import native_arguments
        from headwater.engines.engine import EngineUnavailable

        table: Any = self._document
        for part in key.split("."):
            if not isinstance(table, dict) or part not in table:
                table_names = ", ".join(_tables(self._document)) or "none at all"
                raise ConfigError(f"--config-key {key}: {self.path} has no such table; it has {table_names}")
            table = table[part]
        if not isinstance(table, dict):
            raise ConfigError(f"--config-key {key}: {self.path} has a value there, not a table of arguments")
        try:
            return native_arguments.tokens_of(table, f"{self.path}, table {key}")
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
    names = dict.fromkeys(key.partition(".")[0] for key in all_settings())
    return f"; {kind} are {', '.join(names)}"


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
    """A document whose tables have no key twice: YAML's last one would win unnoticed, and TOML refuses it too."""
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
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    return yaml.load(text, Loader)


def _tables(document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield f"{prefix}{name}"
            yield from _tables(value, f"{prefix}{name}.")


# Variables that begin with `HEADWATER_`: settings, our own, those of Kubernetes, and unknown ones.

CONFIG_VARIABLE, KEY_VARIABLE = f"{ENV_PREFIX}CONFIG", f"{ENV_PREFIX}CONFIG_KEY"

OWN: Final = frozenset(
    {
        CONFIG_VARIABLE,
        KEY_VARIABLE,
        *(
            f"{ENV_PREFIX}{name}"
            for name in (
                "ENVIRONMENT_OF",
                "FIRST_FAILURE",
                "EMBEDDINGS_FOLDER",
                "STALLS",
                "STALLS_FREEZES",
                "TEST_INSIDE",
            )
        ),
    }
)
"""What processes of Headwater pass on to others, and the two that are no setting."""

_SERVICE = re.compile(
    r"_SERVICE_HOST\Z|_SERVICE_PORT(_\w+)?\Z|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?\Z"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)


def is_of_a_service(variable: str, text: str) -> bool:
    """Has Kubernetes set it, as it does in each pod for each service of the namespace? One named `headwater` gives HEADWATER_PORT."""
    return bool(_SERVICE.search(variable)) or (variable.endswith("_PORT") and bool(_SERVICE_URL.match(text)))


def is_unset(variable: str, text: str) -> bool:
    """Does it give no value? Templates write empty variables where they have none."""
    return not text or is_of_a_service(variable, text)


def unknown(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that no setting has, each with the one that was most likely meant, "" without any."""
    by_variable = {setting.variable: key for key, setting in all_settings().items()}
    for name, text in sorted(environ.items()):
        is_known = name in by_variable or name in OWN or is_of_a_service(name, text)
        if name.startswith(ENV_PREFIX) and not is_known:
            yield name, _meant(name, by_variable)


def _meant(variable: str, by_variable: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(variable, by_variable, n=1, cutoff=0.85)
    if near:
        return near[0]
    # By a key of a file, as http.port, or with a word too many, as HEADWATER_NATS_URL.
    words = variable.removeprefix(ENV_PREFIX).lower()
    section, _, name = words.partition("_")
    key = nearest_key(f"{section}.{name}") if name else None
    table = key.rpartition(".")[0] if key else ""
    for candidate in (key, table):
        if candidate in all_settings():
            return all_settings()[candidate].variable
    shorter = variable.rpartition("_")[0]
    return shorter if shorter in by_variable else ""


# The sources of values.

CONFIG, CONFIG_KEY = "config", "config_key"
"""Parameters that every command with settings has."""

ENGINE = "worker__engine"

NATIVE: Final = "native"
"""The option of an engine with arguments of its own that takes these, the words after `--`."""

ARGUMENTS = {"engine_name": "worker.engine"}
"""Positional arguments of commands that stand for a setting, which then needs no flag."""


class ValueOrigin(NamedTuple):
    """The origin of a value: `where` is the flag, the variable, or the file and key."""

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
        for parsed_argument in by_name.values():
            parsed_argument.tokens[:] = [token for token in parsed_argument.tokens if not _is_unset(token)]
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
            if setting.fields:
                self._join_table(setting, argument, file)
            elif not argument.tokens and file is not None and setting.key in file.values:
                where = f"{file.path}: {setting.key}"
                value = setting.read([file.values[setting.key]], f"{where} = ")
                argument.tokens.append(Token(keyword=where, source="file", implicit_value=value))
                self.origins[setting.key] = ValueOrigin("file", where)
        engines = (section_of(_given(by_name.get(ENGINE))), registry.DEFAULT_ENGINE)
        candidates = (all_settings().get(f"{engine}.{NATIVE}") for engine in engines)
        native_setting = next((candidate for candidate in candidates if candidate is not None), None)
        native = by_name.get(native_setting.name) if native_setting is not None else None
        if native_setting is not None and native is not None:
            self._add_native(
                native_setting, native, file.engine_arguments(key) if file is not None and key else ()
            )
        elif self._native:
            raise ConfigError(
                f"headwater {' '.join(commands)}: takes no engine arguments: nothing may follow `--`"
            )

    def _join_table(self, setting: Setting, argument: Argument, file: ConfigFile | None) -> None:
        """Read a table from all sources: each changes what it names of the weaker ones."""
        text = os.environ.get(setting.variable, "")
        tokens = [token for token in argument.tokens if token.source != "env"]
        layers: list[tuple[ValueOrigin, list[Any], str]] = []
        if file is not None and setting.key in file.values:
            where = f"{file.path}: {setting.key}"
            layers.append((ValueOrigin("file", where), [file.values[setting.key]], f"{where} = "))
        if not is_unset(setting.variable, text):
            layers.append((ValueOrigin("environment", setting.variable), [text], f"{setting.variable}="))
        if tokens:
            origin = _origin(tokens[0])
            layers.append((origin, [token.value for token in tokens], f"{origin.where} "))
        if not layers:
            return
        value = None
        for _, layer_values, source in layers:
            value = setting.read(layer_values, source, value)
        origin = ValueOrigin(
            layers[-1][0].source, " over ".join(layer_origin.where for layer_origin, *_ in reversed(layers))
        )
        argument.tokens[:] = [Token(keyword=origin.where, source="file", implicit_value=value)]
        self.origins[setting.key] = origin

    def _add_native(self, setting: Setting, argument: Argument, section: tuple[str, ...]) -> None:
        """Join an engine's arguments of all sources, the strongest last: its parser lets the last word win."""
        if not section and not self._native:
            return
        words = self._native
        if words and not words[0].startswith("-"):
            # As engines' own commands have it: `serve MODEL`.
            words = ("--model", *words)
        setting_words: tuple[str, ...] = ()
        if argument.tokens:
            setting_words = read_tokens(setting, argument.tokens)
        self.origins[setting.key] = (
            ValueOrigin("flag", "--") if self._native else ValueOrigin("file", "--config-key")
        )
        argument.tokens[:] = [
            Token(keyword="--", source="cli", implicit_value=(*section, *setting_words, *words))
        ]


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
        target = by_name[setting.name]
        if target.tokens and target.tokens[0].source == "cli" and target.tokens[0].value != word:
            raise ConfigError(
                f"{word} and {setting.flag} {target.tokens[0].value} contradict each other: give one"
            )
        target.tokens[:] = [Token(keyword=setting.flag, value=word, source="cli")]


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
