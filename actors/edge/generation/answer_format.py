"""How the answer to a request is read: as plain text, or by a parser that finds reasoning and tool calls. Pure.

`tool_choice` "required" and a named tool are enforced by structured output: the whole answer is JSON then, whatever
format the model would write calls in.
"""

from typing import Any, NamedTuple

import msgspec

from headwater.actors.edge.generation.request import GenerationRequest, Tool
from headwater.actors.edge.guided.json_schema import check_schema
from headwater.actors.edge.parsing.events import OutputParser
from headwater.actors.edge.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from headwater.actors.edge.parsing.formats.forced import forced_schema
from headwater.actors.edge.parsing.grammar.response_template import ResponseTemplate
from headwater.actors.edge.parsing.selection.make import make_parser, starts_in_reasoning
from headwater.actors.edge.parsing.selection.names import RESPONSE_TEMPLATE
from headwater.actors.http.errors import bad_request
from headwater.schemas.messages.inference import Guide
from headwater.schemas.tables.card import ModelCard


class AnswerFormat(NamedTuple):
    """The formats of tool calls and reasoning ("" for none), the tools on offer, and whether several calls are wanted.

    `guide` enforces a tool choice. `response_template` is the model's own description of its answers, if it has one.
    """

    tool_format: str = ""
    reasoning_format: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    parallel: bool = True
    guide: Guide | None = None
    starts_in_reasoning: bool = False
    response_template: ResponseTemplate | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the answer is text and nothing else."""
        return not self.tool_format and not self.reasoning_format

    def after(self, prompt: str, *, guided: bool = False) -> "AnswerFormat":
        """The same for an answer that follows this rendered prompt. `guided`: it conforms to a guide from its first token on.

        Such an answer is no reasoning, also where the prompt opens some, or the model always begins with it.
        """
        if not self.reasoning_format or guided:
            return self
        inside = starts_in_reasoning(self.reasoning_format, prompt, self.response_template)
        return self._replace(starts_in_reasoning=inside)

    def parser(self) -> OutputParser:
        """A parser for one answer."""
        return make_parser(
            self.tool_format,
            self.reasoning_format,
            tools=self.tools,
            parse_tools=bool(self.tool_format),
            parse_reasoning=True,
            starts_in_reasoning=self.starts_in_reasoning,
            response_template=self.response_template,
        )


PLAIN = AnswerFormat()


def answer_format(
    request: GenerationRequest, card: ModelCard, response_template: ResponseTemplate | None = None
) -> AnswerFormat:
    """How the answer is read. Raises `ApiError` 400 for a tool choice that this model cannot serve."""
    if request.raw_answer or not request.messages:
        return PLAIN
    own = {RESPONSE_TEMPLATE} if response_template is not None else set()
    reasoning = card.reasoning_parser if card.reasoning_parser in REASONING_FORMATS.keys() | own else ""
    choice = request.tool_choice
    tools = tuple(tool_definition(tool) for tool in request.tools)
    if choice.mode in ("required", "named"):
        named = choice.name if choice.mode == "named" else ""
        if named:
            tools = tuple(tool for tool in tools if tool["function"]["name"] == named)
        return AnswerFormat(
            "forced_call" if named else "forced_calls",
            tools=tools,
            parallel=choice.parallel,
            guide=_guide(request, named),
        )
    if not tools or choice.mode == "none":
        return AnswerFormat(reasoning_format=reasoning, response_template=response_template)
    if card.tool_parser not in TOOL_FORMATS.keys() | own:
        raise bad_request(
            f"The format in which {card.name} writes tool calls is not known, so tool_choice auto is not supported for"
            " it; the operator sets --tool-parser on its workers. tool_choice required, or naming a tool, works"
            " without.",
            param="tools",
        )
    return AnswerFormat(
        card.tool_parser, reasoning, tools, choice.parallel, response_template=response_template
    )


def tool_definition(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates and parsers expect it."""
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _guide(request: GenerationRequest, named: str) -> Guide:
    if not request.tools:
        raise bad_request("tool_choice asks for a call, but there are no tools.", param="tool_choice")
    if named and named not in {tool.name for tool in request.tools}:
        raise bad_request(
            f"tool_choice names {named[:64]!r}, which is not among the tools.", param="tool_choice"
        )
    for number, tool in enumerate(request.tools):
        if not named or tool.name == named:
            check_schema(tool.parameters, f"tools[{number}].function.parameters")
    definitions = [tool_definition(tool) for tool in request.tools]
    try:
        schema = forced_schema(definitions, named, request.tool_choice.parallel)
    except ValueError as error:
        raise bad_request(f"{error}.", param="tools") from error
    return Guide("json_schema", msgspec.json.encode(schema).decode())
