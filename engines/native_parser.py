"""Parsing of an engine's own arguments by that engine's own parser, for values by name and for errors that help."""

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from headwater.engines.engine import EngineUnavailable


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
    known: dict[str, argparse.Action] = parser._option_string_actions
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        # What an engine requires, its model, is a setting of Headwater.
        action.required = False
    # A file may have `flag = false` for flags without a negation: these are off by default.
    kept = [
        word for word in words if word in known or not (word.startswith("--no-") and f"--{word[5:]}" in known)
    ]
    try:
        return dict(vars(parser.parse_args(kept)))
    except _NotParsed as error:
        raise EngineUnavailable(_explained(engine, str(error), known, explain)) from None
    except (ValueError, TypeError, IndexError) as error:
        raise EngineUnavailable(f"{engine} cannot parse {' '.join(words)}: {error}") from error


def _explained(engine: str, message: str, known: Mapping[str, Any], explain: Callable[[str], str]) -> str:
    """Argparse's message with the flag's name first, and a hint."""
    _, unrecognized, words = message.partition("unrecognized arguments: ")
    if not unrecognized:
        return f"{engine}'s {message}"
    flags = re.findall(r"(?:^| )(--?[A-Za-z][\w.-]*)", words) or words.split()
    near = difflib.get_close_matches(flags[0], known, n=1)
    guess = f"did you mean {near[0]}?" if near else f"`headwater engine {engine.lower()} -- --help` lists all"
    return f"{engine} has no engine argument {flags[0]}: {explain(flags[0]) or guess}"
