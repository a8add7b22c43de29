"""vLLM's own arguments: words of a command line, parsed by vLLM's parser.

Everything except `parse` works without vLLM, so that mistakes are found without an import of half a minute.
"""

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from headwater.engines.engine import EngineUnavailable
from headwater.engines.native_arguments import has, name_of, number, tokens_of, value, without

__all__ = ["has", "number", "parse", "tokens_of", "value", "without"]


class _Refused(Exception):
    """Raised by vLLM's parser instead of ending the process."""


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
    return name_of(flag) in getattr(FrontendArgs, "__dataclass_fields__", {})
