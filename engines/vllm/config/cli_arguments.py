"""vLLM's own arguments: words of a command line, parsed by vLLM's parser.

Everything except `parse` works without vLLM, so that mistakes are found without an import of half a minute.
"""

from collections.abc import Sequence
from typing import Any

from headwater.engines import native_parser
from headwater.engines.native_arguments import has, name_of, number, tokens_of, value, without

__all__ = ["has", "number", "parse", "tokens_of", "value", "without"]


def parse(words: Sequence[str]) -> dict[str, Any]:
    """The values that these words set, by `AsyncEngineArgs`'s names: see `native_parser`. Raises `EngineUnavailable`."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return native_parser.parse(
        "vLLM", words, AsyncEngineArgs.add_cli_args, base=FlexibleArgumentParser, explain=_of_http_server
    )


def _of_http_server(flag: str) -> str:
    """What to do with a flag of vLLM's HTTP server, "" for another."""
    try:
        from vllm.entrypoints.launchers.cli_args import FrontendArgs
    except ImportError:
        return ""
    if name_of(flag) not in getattr(FrontendArgs, "__dataclass_fields__", {}):
        return ""
    return "it belongs to vLLM's HTTP server, which Headwater's edge replaces: omit it"
