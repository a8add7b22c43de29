"""How an answer is read follows from the model's card, its own response_template, and the tools of the request."""

import json

import pytest

from headwater.actors.edge.parsing.grammar import collect
from headwater.actors.edge.parsing.response_template import load_response_template
from headwater.actors.edge.prompt.prompts import answer_format
from headwater.actors.edge.prompt.request import GenerationRequest, TextPart, Tool, ToolChoice, Turn
from headwater.actors.http.errors import ApiError
from headwater.schemas.tables import ModelCard
from tests.unit.actors.edge.parsing.test_response_template import TAGS

TEMPLATE = load_response_template(json.dumps(TAGS))
TOOL = Tool("f", parameters={"type": "object", "properties": {"n": {"type": "integer"}}})


def request(*tools: Tool, mode: str = "auto") -> GenerationRequest:
    return GenerationRequest(
        model="m",
        param="messages",
        messages=(Turn(role="user", parts=(TextPart("hi"),)),),
        tools=tools,
        tool_choice=ToolChoice(mode),  # type: ignore[arg-type]
    )


def card(tool_parser: str, reasoning_parser: str) -> ModelCard:
    """The card of a model with these formats."""
    return ModelCard(
        name="m",
        pool="p",
        block_size=16,
        context_length=100,
        tokenizer="",
        chat_template="",
        special_tokens={},
        eos_token_ids=(),
        engine="sim",
        capabilities=("generate", "guide"),
        created_s=0,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )


OWN = card("response_template", "response_template")


def test_a_models_own_template_reads_its_calls_and_reasoning() -> None:
    """Arguments are cast by the tool's schema; a prompt that ends inside reasoning is noticed."""
    read_as = answer_format(request(TOOL), OWN, TEMPLATE)
    parser = read_as.after("<|assistant|>").parser()
    found = collect(
        [*parser.push("<thought>hm</thought><call:f>"), *parser.push("<n>3</n></call>"), *parser.finish()]
    )
    assert found.reasoning == "hm"
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("f", {"n": 3})]
    assert read_as.after("<|assistant|><think>").starts_in_reasoning
    assert not read_as.after("<|assistant|>").starts_in_reasoning


def test_reasoning_is_read_without_tools() -> None:
    """The same template, with no tools on offer."""
    parser = answer_format(request(), OWN, TEMPLATE).parser()
    found = collect([*parser.push("<think>hm</think>Hi"), *parser.finish()])
    assert (found.reasoning, found.text.strip()) == ("hm", "Hi")


def test_a_card_whose_template_is_missing_reads_plain_text() -> None:
    """Reasoning stays text, and tools that the model may choose are refused by name."""
    assert answer_format(request(), OWN).is_plain
    with pytest.raises(ApiError, match="--tool-parser"):
        answer_format(request(TOOL), OWN)


@pytest.mark.parametrize("mode", ["required", "named"])
def test_forced_calls_need_no_format(mode: str) -> None:
    """Structured output enforces them."""
    asked = request(TOOL)
    choice = ToolChoice(mode, "f" if mode == "named" else "")  # type: ignore[arg-type]
    asked = GenerationRequest(
        model=asked.model, param=asked.param, messages=asked.messages, tools=asked.tools, tool_choice=choice
    )
    read_as = answer_format(asked, card("", ""))
    assert read_as.guide is not None
    assert read_as.tool_format == ("forced_call" if mode == "named" else "forced_calls")
