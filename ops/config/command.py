"""Commands: functions whose parameters are the settings that they use, and options of their own.

    @command
    async def tree(settings: PoolReader) -> int: ...

A parameter or a field of a parameter's `NamedTuple` that has name and type of a field of `Settings` stands for its
settings: for each a flag, a variable and a key. Other parameters are the command's own: positional ones are
arguments, those after `*` are flags, with the description of their `Meta`.
"""

import inspect
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints, overload

import msgspec
from cyclopts import App, Group, Parameter, Token

from headwater.engines.traits import Text
from headwater.ops.config.processes import (
    DEFAULTS,
    GROUPS,
    SECTION_TYPES,
    LogSettings,
    setting,
    settings_below,
)
from headwater.ops.config.setting import (
    Flag,
    Prefix,
    Setting,
    base_of,
    description_of,
    is_section,
    marker,
    markers,
    setting_of,
    struct_settings,
    value_at,
    with_values,
)
from headwater.ops.config.sources import (
    CONFIG,
    CONFIG_KEY,
    CONFIG_VARIABLE,
    ENGINE,
    KEY_VARIABLE,
    NATIVE,
    read_tokens,
)

OPTIONS = Group("Options", sort_key=0)
COLUMNS = Group("Columns", sort_key=1)
CONFIGURATION = Group("Configuration file", sort_key=len(GROUPS) + 1)

NEED_ALL: Final = frozenset({"--help", "-h", "--config", "--config-key"})
"""Flags with which a command line needs the parameters of all settings."""


class Key(NamedTuple):
    """Annotation of a command's parameter: it stands for the setting of this key."""

    key: str


class AnyWord(NamedTuple):
    """Annotation of an argument or option of a command's own: it takes words that look like flags, too, such as -5m."""


Json = Annotated[bool, Flag("json"), msgspec.Meta(description="print JSON")]
"""The option of a command that prints what it found for programs, too."""


class Options(NamedTuple):
    """Annotation of a command's parameter that is a `NamedTuple` of options of its own."""


class Columns(NamedTuple):
    """Annotation of a command's parameter: options named like the fields of a struct, each of which may be repeated.

    The parameter gets those that are given: a tuple of values by field.
    """

    struct: Any


Process = Callable[[Any], Awaitable[int]]
"""What a process does until the event that it gets is set, to its exit code."""

Function = Callable[..., int | Coroutine[Any, Any, int] | Process]
"""What a command does, to its exit code. An asynchronous one ends with the first signal; a process is told to stop by it."""


class Bound(NamedTuple):
    """A function with the arguments that a command line gives it."""

    function: Function
    arguments: dict[str, Any]
    positional: tuple[Any, ...] = ()

    @property
    def log(self) -> LogSettings | None:
        """How it logs; None for a command without settings."""
        log_settings = (
            getattr(value, "log", None) for value in self.arguments.values() if is_section(type(value))
        )
        return next((candidate for candidate in log_settings if candidate is not None), None)

    def run(self) -> int | Coroutine[Any, Any, int] | Process:
        """Call the function."""
        return self.function(*self.positional, **self.arguments)


class Command:
    """A function as a command. Called with flat values by name, as cyclopts has them, it returns a `Bound`.

    Its parameters are made when they are first asked for: a command line needs those of one command.
    """

    def __init__(
        self,
        function: Function,
        defaults: Mapping[str, Any],
        notes: str = "",
        *,
        given: frozenset[str] | None = None,
    ) -> None:
        """`given`: the flags on a command line, None for a command with the parameters of all its settings."""
        self.function = function
        self._changed = defaults
        self._notes = notes
        self._given = given
        self.__name__ = function.__name__
        self.__doc__ = f"{_flowing(inspect.getdoc(function) or '')}\n\n{notes}".strip()
        self.__module__ = function.__module__
        # The signature has them.
        self.__annotations__ = {}

    def for_line(self, words: Sequence[str]) -> "Command":
        """The same command with those settings alone that these words or a variable give: cyclopts takes half a millisecond for each.

        Help and a configuration file need all of them.
        """
        flags = frozenset(word.partition("=")[0] for word in words)
        if flags & NEED_ALL or not os.environ.keys().isdisjoint((CONFIG_VARIABLE, KEY_VARIABLE)):
            return self
        return Command(self.function, self._changed, self._notes, given=flags)

    @cached_property
    def __signature__(self) -> inspect.Signature:
        return inspect.Signature(list(self._parameters()))

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return get_type_hints(self.function, include_extras=True)

    @cached_property
    def _defaults(self) -> dict[tuple[str, ...], Any]:
        return {setting(key).path: value for key, value in self._changed.items()}

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The settings that it uses, in the order of help."""
        return tuple(setting for part in self.parts for setting in settings_below(part))

    @property
    def parts(self) -> tuple[str, ...]:
        """The fields of `Settings` that it uses, in the order of help."""
        used = {field for name in self._hints for field in self._fields_of(name)}
        return tuple(name for name in SECTION_TYPES if name in used)

    def default(self, setting: Setting) -> Any:
        """The default that a setting has for this command."""
        return self._defaults.get(setting.path, setting.default)

    def __call__(self, *words: Any, **named: Any) -> Bound:
        """The function with its arguments, sections assembled from defaults and what is given."""
        bound = self.__signature__.bind_partial(*words, **named)
        bound_arguments = bound.arguments
        arguments: dict[str, Any] = {}
        positional: list[Any] = []
        for name, parameter in inspect.signature(self.function).parameters.items():
            kind = self._hints[name]
            key = marker(kind, Key)
            if key is not None:
                option = setting(key.key)
                arguments[name] = bound_arguments.get(option.name, self.default(option))
            elif options := _options_of(kind):
                options_given = {
                    option.path[0]: bound_arguments[option.name]
                    for option in options
                    if option.name in bound_arguments
                }
                arguments[name] = options_given if marker(kind, Columns) else base_of(kind)(**options_given)
            elif fields := self._fields_of(name):
                values = {field: self._section(field, bound_arguments) for field in fields}
                arguments[name] = values[name] if name in values else base_of(kind)(**values)
            elif name in bound_arguments:
                if parameter.kind is parameter.VAR_POSITIONAL:
                    positional += bound_arguments[name]
                elif parameter.kind is parameter.POSITIONAL_ONLY:
                    positional.append(bound_arguments[name])
                else:
                    arguments[name] = bound_arguments[name]
        return Bound(self.function, arguments, tuple(positional))

    def _section(self, field: str, bound_arguments: Mapping[str, Any]) -> Any:
        values = {path[1:]: value for path, value in self._defaults.items() if path[0] == field}
        values |= {
            setting.path[1:]: bound_arguments[setting.name]
            for setting in settings_below(field)
            if setting.name in bound_arguments
        }
        base = getattr(DEFAULTS, field)
        return values[()] if () in values else with_values(base, values) if values else base

    def _fields_of(self, name: str) -> tuple[str, ...]:
        """The fields of `Settings` that a parameter stands for."""
        kind = self._hints[name]
        if name in SECTION_TYPES and _same(kind, SECTION_TYPES[name]):
            return (name,)
        if not is_section(base_of(kind)) or marker(kind, Options) is not None:
            return ()
        return tuple(base_of(kind)._fields)

    def _parameters(self) -> Iterator[inspect.Parameter]:
        parameters = inspect.signature(self.function).parameters.values()
        reused: list[Setting] = []
        for parameter in parameters:
            kind = self._hints[parameter.name]
            key = marker(kind, Key)
            if key is not None:
                reused.append(setting(key.key))
            elif options := _options_of(kind):
                many = marker(kind, Columns) is not None
                yield from (_option(entry, many=many) for entry in options)
            elif parameter.name != "return" and not self._fields_of(parameter.name):
                yield _own(parameter, kind)
        settings = [*reused, *self.settings]
        if self._given is not None:
            yield from (
                _parameter(entry, self.default(entry)) for entry in settings if _is_given(entry, self._given)
            )
            return
        for entry in settings:
            yield _parameter(entry, self.default(entry))
        if settings:
            yield _file_parameter(CONFIG, CONFIG_VARIABLE, "FILE", "TOML or YAML file with settings")
        if "engines" in self.parts:
            text = "table of that file with the engine's own arguments, such as engines.prefill"
            yield _file_parameter(CONFIG_KEY, KEY_VARIABLE, "KEY", text)


@overload
def command(function: Function) -> Command: ...


@overload
def command(
    *, defaults: Mapping[str, Any] | None = None, notes: str = ""
) -> Callable[[Function], Command]: ...


def command(
    function: Function | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    notes: str = "",
) -> Command | Callable[[Function], Command]:
    """Make a function a command.

    `defaults`: values by key that differ from the settings' own. `notes` follow its docstring in help.
    """
    if function is None:
        return lambda real: Command(real, defaults or {}, notes)
    return Command(function, defaults or {}, notes)


def _is_given(one: Setting, flags: frozenset[str]) -> bool:
    """May a command line with these flags give a value of it? The words after `--` and an argument of `engine` do, too."""
    return (
        not flags.isdisjoint((one.flag, f"--no-{one.flag[2:]}"))
        or one.variable in os.environ
        or one.path[-1] == NATIVE
        or one.name == ENGINE
    )


def _flowing(text: str) -> str:
    """Paragraphs in one line each: help breaks them where the terminal ends."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _same(kind: Any, other: Any) -> bool:
    return base_of(kind) is base_of(other) if is_section(base_of(other)) else kind == other


@cache
def _group(title: str) -> Group:
    return Group(title, sort_key=1 + list(dict.fromkeys(GROUPS.values())).index(title))


def _flag(one: Setting, group: Group, default: Any, *, many: bool = False, **more: Any) -> inspect.Parameter:
    """Return what cyclopts is to know of a flag; `many`: its parameter gets the values of all times that it is given."""
    # No types of the values: where pydantic is imported, cyclopts compares what converters return with them.
    hint: Any = Literal[one.choices] if one.choices else Any
    if many or one.repeatable or one.fields:
        hint = tuple[Any, ...]
    elif one.base is bool:
        hint = bool

    def read(_type: Any, tokens: Sequence[Token]) -> Any:
        return tuple(read_tokens(one, [token]) for token in tokens) if many else read_tokens(one, tokens)

    details = Parameter(
        name=one.flag,
        group=group,
        help=one.description,
        converter=read,
        metavar=None if hint is bool else one.metavar,
        show_choices="|" not in one.metavar,
        allow_repeating=True,
        # A value of several fields is one setting, with a notation of its own.
        accepts_keys=False,
        n_tokens=None if hint is bool or hint == tuple[Any, ...] else 1,
        **more,
    )
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, details]
    )


def _parameter(setting: Setting, default: Any) -> inspect.Parameter:
    """The flag of a setting, which may also come from a variable."""
    return _flag(
        setting,
        _group(setting.group),
        default,
        env_var=setting.variable,
        env_var_split=_whole,
        negative=f"--no-{setting.flag[2:]}" if setting.base is bool else (),
        show_default=_shown(setting, default),
    )


def _options_of(kind: Any) -> tuple[Setting, ...]:
    """The options that a parameter with `Options` or `Columns` stands for."""
    columns = marker(kind, Columns)
    if columns is not None:
        return struct_settings(columns.struct, group="Columns")
    return struct_settings(base_of(kind)) if marker(kind, Options) is not None else ()


def _option(setting: Setting, *, many: bool) -> inspect.Parameter:
    """The flag of an option of a command's own."""
    shown = (
        isinstance(setting.default, str | int | float)
        and not isinstance(setting.default, bool)
        and setting.default not in ("", -1.0)
    )
    return _flag(
        setting,
        COLUMNS if many else OPTIONS,
        (setting.default,) if many else setting.default,
        many=many,
        negative=f"--no-{setting.flag[2:]}" if setting.default is True else (),
        show_default=(lambda _: setting.write(setting.default))
        if shown or (setting.repeatable and setting.default)
        else False,
    )


def _whole(_type: Any, text: str, *, delimiter: str | None = None) -> list[str]:
    return [text]


def _shown(setting: Setting, default: Any) -> Any:
    if (
        setting.fields
        or default in ("", (), {}, None)
        or default is False
        or "(default: " in setting.description
    ):
        return False
    return lambda _: setting.write(default)


def _own(parameter: inspect.Parameter, kind: Any) -> inspect.Parameter:
    """A parameter of the command's own, with its description, constraints and notation."""
    text, flag = marker(kind, Text), marker(kind, Flag)
    positional = parameter.kind is not parameter.KEYWORD_ONLY
    details: dict[str, Any] = {
        "help": description_of(kind),
        "negative": f"--no-{parameter.name.replace('_', '-')}" if parameter.default is True else (),
        "allow_leading_hyphen": marker(kind, AnyWord) is not None,
    }
    if not positional:
        details["group"] = OPTIONS
    if flag is not None:
        names = (f"--{flag.name}", *((f"-{flag.short}",) if flag.short else ()))
        details["name"] = flag.name if positional else names
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if not positional and text is None and base_of(kind) is not bool:
        one = setting_of(parameter.name, kind, "", key="", group="", how=Prefix(), path=(parameter.name,))
        name = flag.name if flag is not None else parameter.name
        details["metavar"] = name.upper() if one.repeatable else one.metavar
    if text is not None:
        details["metavar"] = text.metavar
    if any(isinstance(one, msgspec.Meta) for one in markers(kind)):
        details["validator"] = lambda _type, value: _validate(kind, value)
    if parameter.default in ("", (), None, False):
        details["show_default"] = False
    return parameter.replace(annotation=Annotated[plain, Parameter(**details)])


def _validate(kind: Any, value: Any) -> None:
    if value is not None:
        msgspec.convert(value, kind)


def _file_parameter(name: str, variable: str, metavar: str, text: str) -> inspect.Parameter:
    details = Parameter(
        name=f"--{name.replace('_', '-')}",
        group=CONFIGURATION,
        help=text,
        env_var=variable,
        metavar=metavar,
        show_default=False,
        allow_repeating=True,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default="", annotation=Annotated[str, details]
    )


def setting_value(bound: Bound, setting: Setting) -> Any:
    """The value of a setting among a command's arguments."""
    for value in bound.arguments.values():
        if is_section(type(value)) and hasattr(value, setting.path[0]):
            return value_at(value, setting.path)
    return value_at(bound.arguments[setting.path[0]], setting.path[1:])


def group(name: str, default: Command | None, **commands: Command) -> App:
    """Several commands under one name; `default` runs when none of the others is named."""
    app = App(name=name)
    if default is not None:
        app.default(default)
    for command_name, command in commands.items():
        app.command(command, name=command_name)
    return app
