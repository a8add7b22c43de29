"""The formats of a model's tool calls and reasoning: detected from its files, or given by name."""

import msgspec

from headwater.actors.edge.parsing.formats.response_template import InvalidTemplate, load_response_template
from headwater.actors.edge.parsing.selection.detect import Detected, detect
from headwater.actors.edge.parsing.selection.names import (
    RESPONSE_TEMPLATE,
    UnknownParser,
    reasoning_format_of,
    tool_format_of,
)
from headwater.engines.engine import EngineUnavailable
from headwater.engines.model_files import ModelFiles


class _AddedToken(msgspec.Struct):
    content: str = ""


class _Tokenizer(msgspec.Struct):
    """The one part of tokenizer.json that is looked at."""

    added_tokens: list[_AddedToken] = []


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raises `EngineUnavailable` for a name that is not accepted; "" stands for detection."""
    try:
        _ = tool_parser and tool_format_of(tool_parser)
        _ = reasoning_parser and reasoning_format_of(reasoning_parser)
    except UnknownParser as error:
        raise EngineUnavailable(str(error)) from error


def find(tool_parser: str, reasoning_parser: str, files: ModelFiles) -> Detected:
    """Return the formats of a model and the reason for each. Raises `EngineUnavailable`."""
    check_names(tool_parser, reasoning_parser)
    found = detect(
        files.chat_template,
        added_tokens=[token.content for token in _added_tokens(files.tokenizer)],
        has_response_template=bool(files.response_template),
    )
    if tool_parser:
        found = found._replace(tool_format=tool_format_of(tool_parser), tool_reason="--tool-parser")
    if reasoning_parser:
        found = found._replace(
            reasoning_format=reasoning_format_of(reasoning_parser), reasoning_reason="--reasoning-parser"
        )
    if RESPONSE_TEMPLATE in (found.tool_format, found.reasoning_format):
        _check_template(found, files)
    return found


def _check_template(found: Detected, files: ModelFiles) -> None:
    if found.tool_format not in ("", RESPONSE_TEMPLATE) or found.reasoning_format not in (
        "",
        RESPONSE_TEMPLATE,
    ):
        raise EngineUnavailable(
            "--tool-parser and --reasoning-parser: response_template describes both formats; give it for both, or none"
        )
    if not files.response_template:
        raise EngineUnavailable(
            "--tool-parser and --reasoning-parser: the model's tokenizer_config.json has no response_template"
        )
    try:
        load_response_template(files.response_template)
    except InvalidTemplate as error:
        raise EngineUnavailable(
            f"{files.name}: {error}; name the formats with --tool-parser and --reasoning-parser"
        ) from error


def _added_tokens(tokenizer: bytes) -> list[_AddedToken]:
    try:
        return msgspec.json.decode(tokenizer, type=_Tokenizer).added_tokens
    except msgspec.DecodeError:
        return []  # whether it is a tokenizer at all is checked elsewhere
