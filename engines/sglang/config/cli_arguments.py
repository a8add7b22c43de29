"""SGLang's own arguments: words of a command line, parsed by SGLang's parser."""

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from headwater.engines import native_arguments
from headwater.engines.engine import EngineUnavailable

ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "tp_size": ("tp_size", "tensor_parallel_size"),
    "pp_size": ("pp_size", "pipeline_parallel_size"),
    "dp_size": ("dp_size", "data_parallel_size"),
    "model_path": ("model_path", "model"),
}
"""Arguments that are looked up by name without SGLang, with all their spellings."""


class _NotParsed(Exception):
    """Raised by SGLang's parser instead of ending the process."""


def value(words: Sequence[str], name: str) -> str | None:
    """The value of an argument in any of its spellings, None if it is absent."""
    for spelling in ALIASES.get(name, (name,)):
        found = native_arguments.value(words, spelling)
        if found is not None:
            return found
    return None


def number(words: Sequence[str], name: str, default: int) -> int:
    """`value` as a number. Raises `EngineUnavailable` for anything else."""
    for spelling in ALIASES.get(name, (name,)):
        if native_arguments.has(words, spelling):
            return native_arguments.number(words, spelling, default)
    return default


def is_follower(words: Sequence[str]) -> bool:
    """Is this a node other than the first of an engine of several? It has no requests of its own."""
    return number(words, "node_rank", 0) > 0


def parse(words: Sequence[str]) -> dict[str, Any]:
    """The values that these words set, by `ServerArgs`' names, parsed by SGLang's own parser.

    Raises `EngineUnavailable` naming the argument. `--help` prints SGLang's and ends the process.
    """
    from sglang.srt.server_args import ServerArgs

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise _NotParsed(message)

    # Unabbreviated: a unique prefix may become ambiguous with the next release.
    parser = Parser(prog="headwater engine sglang --", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    known: dict[str, argparse.Action] = parser._option_string_actions
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        # The model is a setting of Headwater.
        action.required = False
    # A file may have `flag = false` for flags without a negation: these are off by default.
    kept = [
        word for word in words if word in known or not (word.startswith("--no-") and f"--{word[5:]}" in known)
    ]
    try:
        return dict(vars(parser.parse_args(kept)))
    except _NotParsed as error:
        raise EngineUnavailable(_explained(str(error), known)) from None
    except (ValueError, TypeError, IndexError) as error:
        raise EngineUnavailable(f"SGLang cannot parse {' '.join(words)}: {error}") from error


def _explained(message: str, known: Mapping[str, Any]) -> str:
    """Argparse's message with the flag's name first, and a hint."""
    _, unrecognized, words = message.partition("unrecognized arguments: ")
    if not unrecognized:
        return f"SGLang's {message}"
    flags = re.findall(r"(?:^| )(--?[A-Za-z][\w.-]*)", words) or words.split()
    near = difflib.get_close_matches(flags[0], known, n=1)
    hint = f"did you mean {near[0]}?" if near else "`headwater engine sglang -- --help` lists all"
    return f"SGLang has no engine argument {flags[0]}: {hint}"
