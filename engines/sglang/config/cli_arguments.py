"""SGLang's own arguments: words of a command line, parsed by SGLang's parser."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from headwater.engines import native_arguments, native_parser

ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "tp_size": ("tp_size", "tensor_parallel_size"),
    "pp_size": ("pp_size", "pipeline_parallel_size"),
    "dp_size": ("dp_size", "data_parallel_size"),
    "model_path": ("model_path", "model"),
}
"""Arguments that are looked up by name without SGLang, with all their spellings."""


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
    """The values that these words set, by `ServerArgs`' names: see `native_parser`. Raises `EngineUnavailable`."""
    from sglang.srt.server_args import ServerArgs

    return native_parser.parse("SGLang", words, ServerArgs.add_cli_args)
