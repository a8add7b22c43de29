"""vLLM's own arguments: found in a command line, built from a file's section, parsed by vLLM's parser.

Everything except `parse` works without vLLM, so that mistakes are found without an import of half a minute.
"""

import argparse
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from headwater.engines.engine import EngineUnavailable

SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size"}
"""vLLM's short forms of arguments that are looked up by name; `parse` accepts all short forms."""


class _Refused(Exception):
    """Raised by vLLM's parser instead of ending the process."""


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
                    words += [flag, *(item if isinstance(item, str) else _json(item) for item in value)]
            case dict():
                words.append(f"{flag}={_json(value)}")
            case _:
                raise EngineUnavailable(
                    f"{where}: {name} = {value!r} is not a valid argument value: use text, a number, true, "
                    "false, a list or a table"
                )
    return tuple(words)


def with_model_flag(words: Sequence[str]) -> tuple[str, ...]:
    """The same words with `--model` before a leading positional word, which `vllm serve` accepts as the model."""
    return ("--model", *words) if words and not words[0].startswith("-") else tuple(words)


def value(words: Sequence[str], name: str) -> str | None:
    """The value that argument `name` (with underscores) has in these words, the last one if there are several.

    "" for a flag without one, None if it is absent.
    """
    found: str | None = None
    for number, word in enumerate(words):
        flag, equals, text = word.partition("=")
        if _name(flag) != name:
            continue
        following = words[number + 1] if number + 1 < len(words) else ""
        found = text if equals else "" if following.startswith("--") else following
    return found


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
    return any(_name(word.partition("=")[0].partition(".")[0]) == name for word in words)


def without(words: Sequence[str], name: str, *, takes_value: bool) -> tuple[str, ...]:
    """The words without argument `name`."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
            continue
        flag, equals, _ = word.partition("=")
        if _name(flag) == name:
            skip = takes_value and not equals
            continue
        kept.append(word)
    return tuple(kept)


def parse(words: Sequence[str]) -> dict[str, Any]:
    """The values that these words set, by `AsyncEngineArgs`'s names, parsed by vLLM's own parser.

    Raises `EngineUnavailable` naming the argument. `--help` prints vLLM's and ends the process.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise _Refused(message)

    # Unabbreviated: a unique prefix may become ambiguous with the next release.
    parser = Parser(prog="headwater engine vllm --", allow_abbrev=False)
    AsyncEngineArgs.add_cli_args(parser)
    known: dict[str, argparse.Action] = parser._option_string_actions
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    # A file may have `flag = false` for flags without a negation: these are off by default.
    kept = [
        word for word in words if word in known or not (word.startswith("--no-") and f"--{word[5:]}" in known)
    ]
    try:
        return dict(vars(parser.parse_args(kept)))
    except _Refused as error:
        raise EngineUnavailable(_explained(str(error), known)) from None
    except (ValueError, TypeError, IndexError) as error:
        raise EngineUnavailable(f"vLLM cannot parse {' '.join(words)}: {error}") from error


def _name(flag: str) -> str:
    return SHORT.get(flag) or (flag[2:].replace("-", "_") if flag.startswith("--") else "")


def _json(value: Any) -> str:
    return json.dumps(value)


def _explained(message: str, known: Mapping[str, Any]) -> str:
    """Argparse's message with the flag's name first, and a hint."""
    _, unrecognized, words = message.partition("unrecognized arguments: ")
    if not unrecognized:
        return f"vLLM's {message}"
    flags = re.findall(r"(?:^| )(--?[A-Za-z][\w.-]*)", words) or words.split()
    near = difflib.get_close_matches(flags[0], known, n=1)
    hint = f"did you mean {near[0]}?" if near else "`headwater engine vllm -- --help` lists all"
    if _of_http_server(flags[0]):
        hint = "it belongs to vLLM's HTTP server, which Headwater's edge replaces: omit it"
    return f"vLLM has no engine argument {flags[0]}: {hint}"


def _of_http_server(flag: str) -> bool:
    try:
        from vllm.entrypoints.launchers.cli_args import FrontendArgs
    except ImportError:
        return False
    return _name(flag) in getattr(FrontendArgs, "__dataclass_fields__", {})
