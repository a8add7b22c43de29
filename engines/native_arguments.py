"""An engine's own arguments as words of a command line: built from a file's section, found by name, and parsed by that engine."""

import argparse
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from headwater.engines.engine import EngineUnavailable

SPELLINGS = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "--tp-size": "tensor_parallel_size",
    "--pp-size": "pipeline_parallel_size",
    "--dp-size": "data_parallel_size",
}
"""Other spellings, in vLLM or SGLang, of arguments that are looked up by name."""


def tokens_of(section: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """A table of arguments by name (dashes or underscores) as words of a command line.

    True is the flag alone, False its `--no-` form, a list several values, a table JSON. `where` names the table in
    errors (`EngineUnavailable`).
    """
    words: list[str] = []
    for name, value in section.items():
        flag = "--" + str(name).replace("_", "-")
        match value:
            case bool():
                words.append(flag if value else "--no-" + flag[2:])
            case str() | int() | float():
                # In one word: a value may start with a dash.
                words.append(f"{flag}={value}")
            case list():
                if value:
                    words += [flag, *(item if isinstance(item, str) else json.dumps(item) for item in value)]
            case dict():
                words.append(f"{flag}={json.dumps(value)}")
            case _:
                raise EngineUnavailable(
                    f"{where}: {name} = {value!r} is not a valid argument value: use text, a number, true, "
                    "false, a list or a table"
                )
    return tuple(words)


def value(words: Sequence[str], name: str) -> str | None:
    """The value that argument `name` (with underscores) has in these words, the last one if there are several.

    "" for a flag without one, None if it is absent.
    """
    found_value: str | None = None
    for number, word in enumerate(words):
        flag, equals, text = word.partition("=")
        if name_of(flag) != name:
            continue
        following = words[number + 1] if number + 1 < len(words) else ""
        found_value = text if equals else "" if following.startswith("--") else following
    return found_value


def number(words: Sequence[str], name: str, default: int) -> int:
    """`value` as a number. Raises `EngineUnavailable` for anything else."""
    text = value(words, name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise EngineUnavailable(f"--{name.replace('_', '-')} {text}: use an integer") from None


def has(words: Sequence[str], name: str) -> bool:
    """Is argument `name` (with underscores) among these words, also in its dotted form (`--name.key value`)?"""
    return any(name_of(word.partition("=")[0].partition(".")[0]) == name for word in words)


def without(words: Sequence[str], name: str, *, takes_value: bool) -> tuple[str, ...]:
    """The words without argument `name`."""
    remaining: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
            continue
        flag, equals, _ = word.partition("=")
        if name_of(flag) == name:
            skip = takes_value and not equals
            continue
        remaining.append(word)
    return tuple(remaining)


def check_agreement(
    engine: str, native_options: Mapping[str, Any], settings: Mapping[str, tuple[int, str]]
) -> None:
    """Raise `EngineUnavailable` if a setting and one of the engine's own arguments in `native_options` differ.

    `settings` has, for a setting's flag, its value and the name of the argument that means the same.
    """
    for flag, (setting, name) in settings.items():
        native_value = native_options.get(name)
        if setting and native_value is not None and setting != native_value:
            raise EngineUnavailable(
                f"{flag} {setting} and, among {engine}'s own arguments, --{name.replace('_', '-')} {native_value} disagree: "
                "omit one"
            )


def name_of(flag: str) -> str:
    """An argument's name with underscores, whatever its spelling; "" for a word that is no flag."""
    return SPELLINGS.get(flag) or (flag[2:].replace("-", "_") if flag.startswith("--") else "")


# Parsing by the engine's own parser, for values by name and for errors that help.


class _NotParsed(Exception):
    """Raised by the parser instead of ending the process."""


def parse(
    engine: str,
    words: Sequence[str],
    declare: Callable[[Any], Any],
    *,
    base: type[argparse.ArgumentParser] = argparse.ArgumentParser,
    explain: Callable[[str], str] = lambda flag: "",
) -> dict[str, Any]:
    """The values that these words set, by the names that the engine gives them. `engine` is its name for users.

    `declare` adds the engine's arguments to a parser, which is of class `base`. `explain` may say why a flag does not exist, ""
    for a guess. Raises `EngineUnavailable` naming the argument. `--help` prints the engine's and ends the process.
    """
    command = f"headwater engine {engine.lower()} --"

    class Parser(base):  # type: ignore[misc, valid-type]  # the base is the engine's, known at run time
        def error(self, message: str) -> NoReturn:
            raise _NotParsed(message)

    # Unabbreviated: a unique prefix may become ambiguous with the next release.
    parser = Parser(prog=command, allow_abbrev=False)
    declare(parser)
    actions: dict[str, argparse.Action] = parser._option_string_actions
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        # What an engine requires, its model, is a setting of Headwater.
        action.required = False
    # A file may have `flag = false` for flags without a negation: these are off by default.
    kept_words = [
        word
        for word in words
        if word in actions or not (word.startswith("--no-") and f"--{word[5:]}" in actions)
    ]
    try:
        return dict(vars(parser.parse_args(kept_words)))
    except _NotParsed as error:
        raise EngineUnavailable(_explained(engine, str(error), actions, explain)) from None
    except (ValueError, TypeError, IndexError) as error:
        raise EngineUnavailable(f"{engine} cannot parse {' '.join(words)}: {error}") from error


def _explained(engine: str, message: str, actions: Mapping[str, Any], explain: Callable[[str], str]) -> str:
    """Argparse's message with the flag's name first, and a hint."""
    _, unrecognized, words = message.partition("unrecognized arguments: ")
    if not unrecognized:
        return f"{engine}'s {message}"
    flags = re.findall(r"(?:^| )(--?[A-Za-z][\w.-]*)", words) or words.split()
    near = difflib.get_close_matches(flags[0], actions, n=1)
    guess = f"did you mean {near[0]}?" if near else f"`headwater engine {engine.lower()} -- --help` lists all"
    return f"{engine} has no engine argument {flags[0]}: {explain(flags[0]) or guess}"
