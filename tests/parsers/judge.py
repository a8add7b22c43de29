"""Judging what a parser made of a text against the answer that was written."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headwater.actors.edge.parsing.json_value import types_of_parameter
from headwater.actors.edge.parsing.selection import make_parser
from tests.parsers.answers import Call, ReadCall, Reading, Schema, loads, parameters_of, reading_of, same
from tests.parsers.writers.writer import Writer, Written


def read(
    writer: Writer, tools: Sequence[Mapping[str, Any]], pieces: Iterable[str], *, reasons: bool
) -> Reading:
    """What Headwater's parser makes of a text in pieces. `reasons`: the prompt of a family that never opens reasoning ends inside it."""
    parser = make_parser(
        writer.tool_format,
        writer.reasoning_format,
        tools=tools,
        starts_in_reasoning=writer.inside and reasons,
    )
    events = [event for piece in pieces for event in parser.push(piece)]
    return reading_of([*events, *parser.finish()])


def read_written(written: Written, pieces: Iterable[str] | None = None) -> Reading:
    """What Headwater's parser makes of a written answer, whole or in pieces."""
    reasons = bool(written.answer.reasoning)
    return read(written.writer, written.tools, [written.text] if pieces is None else pieces, reasons=reasons)


def problem_of(written: Written, reading: Reading, *, places: bool = True) -> str:
    """What is wrong with a reading; "" for nothing. Without `places` text counts as a whole, wherever it was between calls."""
    answer = written.answer
    if reading.reasoning != answer.reasoning.strip():
        return f"reasoning is {reading.reasoning!r}, not {answer.reasoning!r}"
    if len(reading.calls) != len(answer.calls):
        return f"{len(reading.calls)} calls, not {len(answer.calls)}"
    for got, meant in zip(reading.calls, answer.calls):
        if problem := problem_of_call(got, meant, written):
            return problem
    got_items = [item if isinstance(item, str) else None for item in reading.items]
    meant_items = [item if isinstance(item, str) else None for item in answer.items]
    if not places:
        got_text, meant_text = (
            "".join("".join(filter(None, items)).split()) for items in (got_items, meant_items)
        )
        return "" if got_text == meant_text else f"text is {got_text!r}, not {meant_text!r}"
    return "" if got_items == meant_items else f"texts are {got_items!r}, not {meant_items!r}"


def problem_of_call(got: ReadCall, meant: Call, written: Written) -> str:
    """What is wrong with a call that was read; "" for nothing."""
    if got.name != meant.name:
        return f"a call of {got.name!r}, not {meant.name!r}"
    if not got.complete:
        return f"the call of {meant.name!r} has no end: {got.arguments!r}"
    try:
        arguments = loads(got.arguments)
    except ValueError:
        return f"arguments are no JSON: {got.arguments!r}"
    if not isinstance(arguments, dict) or arguments.keys() != meant.arguments.keys():
        return f"arguments are {arguments!r}, not {meant.arguments!r}"
    schema = parameters_of(written.tools, meant.name)
    for key, value in meant.arguments.items():
        values = meanings(value, schema, key) if written.writer.typeless else [value]
        if not any(same(arguments[key], one) for one in values):
            return f"{key} is {arguments[key]!r}, not {value!r}"
    return ""


def meanings(value: Any, schema: Schema, key: str) -> list[Any]:
    """What a value may be read as that was written without its type: itself, and other declared types that have the same text."""
    types = types_of_parameter(schema, key)
    found = [value]
    if not types and not isinstance(value, str):
        # As Python prints it: nothing says that it is not a string.
        found.append(str(value))
    if not isinstance(value, str) or types == {"string"}:
        return found
    text = value.strip()
    if ("null" in types or not types) and text in ("null", "None"):
        found.append(None)
    if ("boolean" in types or not types) and text.lower() in ("true", "false"):
        found.append(text.lower() == "true")
    for read_value in (loads, ast.literal_eval):
        try:
            other = read_value(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        name = {dict: "object", list: "array", int: "integer", float: "number"}.get(type(other), "")
        if isinstance(other, float) and other.is_integer() and "integer" in types:
            name = "integer"
        if not types or name in types or (name == "integer" and "number" in types):
            found.append(other)
    return found
