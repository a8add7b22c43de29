"""A parser of answers as a model's own `response_template` describes them (Hugging Face's format, version 1).

A template has fields of a message, each with anchors that open and close its region, and the kind of its content. One
field may lack an opening anchor: it has what is in no other region. Calls are yielded when their region closes, since
only then its content can be parsed; everything else is streamed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import regex

from headwater.actors.edge.parsing.grammar import Context, ReasoningFormat
from headwater.actors.edge.parsing.json_calls import is_object
from headwater.actors.edge.parsing.json_value import cast, types_of_parameter
from headwater.actors.edge.parsing.reader import WHITESPACE, Steps, Write

CONTENTS: Final = frozenset({"text", "int", "float", "bool", "json", "xml-inline", "kv-lines"})
"""The kinds of content that a template may name."""

_REFERENCE: Final = regex.compile(r"\{(\w+(?:\.\w+)*)\}")


def parse_content(kind: str, text: str, options: Mapping[str, Any]) -> Any:
    """Return the value of a region's text. Raises ValueError."""
    if kind == "json":
        return _parse_json(text, options)
    if kind == "xml-inline":
        return _parse_tags(text, options)
    if kind == "kv-lines":
        return _parse_lines(text, options)
    plain = text.strip() if options.get("strip", True) else text
    if kind == "int":
        return int(plain)
    if kind == "float":
        return float(plain)
    return plain.lower() in ("true", "1") if kind == "bool" else plain


def _parse_json(text: str, options: Mapping[str, Any]) -> Any:
    """JSON, whose strings may stand between other marks, and whose keys may lack quotes."""
    parts: list[str] = []
    rest = text
    marks = [(str(start), str(end)) for start, end in options.get("string_delims", ())]
    while rest:
        occurrences = [(at, start, end) for start, end in marks if (at := rest.find(start)) >= 0]
        if not occurrences:
            break
        at, start, end = min(occurrences)
        stop = rest.find(end, at + len(start))
        if stop < 0:
            break
        parts += (rest[:at], json.dumps(rest[at + len(start) : stop]))
        rest = rest[stop + len(end) :]
    parts.append(rest)
    if options.get("unquoted_keys"):
        # Every second part is a string, which is left alone.
        parts[::2] = [regex.sub(r"(?<=[{,])\s*(\w+)\s*:", r'"\1":', part) for part in parts[::2]]
    try:
        return json.loads("".join(parts))
    except (ValueError, RecursionError) as error:
        if options.get("allow_non_json"):
            return text.strip()
        raise ValueError("no JSON") from error


def _parse_inner(text: str, parser: Mapping[str, Any] | None) -> Any:
    if parser is None:
        return text
    return parse_content(str(parser.get("name", "text")), text, parser.get("args", {}))


def _parse_tags(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for match in regex.finditer(options["tag_pattern"], text, flags=regex.DOTALL):
        groups = match.groupdict()
        value = _parse_inner(groups.get("value") or "", options.get("value_parser"))
        key = str(groups["key"])
        if key in values and options.get("merge_duplicates"):
            earlier = values[key]
            values[key] = [*earlier, value] if isinstance(earlier, list) else [earlier, value]
        else:
            values[key] = value
    return values


def _parse_lines(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    separator = str(options.get("kv_sep", ":"))
    for line in text.split(str(options.get("line_sep", "\n"))):
        key, matched, value = line.partition(separator)
        if matched:
            values[key.strip()] = _parse_inner(value.strip(), options.get("value_parser"))
    return values


def transform_value(value: Any, shape: Any, each: bool, captures: Mapping[str, str]) -> Any:
    """Return a value in the shape that a template wants, in which `{name}` stands for a capture or for `content`.

    `each`: the value is a list, and each of its items, with its keys by name, gets the shape. Raises ValueError.
    """
    if shape is None:
        return value
    if not each:
        return _fill(shape, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("no list of objects")
    return [_fill(shape, {**captures, **item}) for item in value]


def _fill(shape: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(shape, dict):
        return {key: _fill(inner, scope) for key, inner in shape.items()}
    if isinstance(shape, list):
        return [_fill(inner, scope) for inner in shape]
    reference = _REFERENCE.fullmatch(shape) if isinstance(shape, str) else None
    if reference is None:
        return shape
    value: Any = scope
    for key in reference[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"nothing for {shape}")
        value = value[key]
    return value


# The template, and its regions in an answer.

CALLS: Final = "tool_calls"

REASONING: Final = frozenset({"thinking", "reasoning", "reasoning_content"})

_STRING: Final = frozenset({"string"})


@dataclass(frozen=True, slots=True)
class Anchor:
    """A pattern that opens or closes a region, made of `literals` if there are any.

    `extensible`: more text could make a match longer.
    """

    pattern: "regex.Pattern[str]"
    extensible: bool
    literals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TemplateField:
    """One field of the message."""

    name: str
    open: Anchor | None
    close: Anchor | None
    content: str
    options: Mapping[str, Any]
    transform: Any
    each: bool

    @property
    def trim(self) -> str:
        """Characters at both ends of the region that are not part of the value."""
        return WHITESPACE if self.content != "text" or self.options.get("strip", True) else ""


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """A loaded template: the fields with an opening anchor, and the one without, if there is one."""

    fields: tuple[TemplateField, ...]
    implicit: TemplateField | None

    def reasoning_format(self) -> ReasoningFormat | None:
        """Return the reasoning alone, for answers whose rest has another form; None unless its anchors are literals."""
        for field in self.fields:
            if (
                field.name in REASONING
                and field.open is not None
                and field.open.literals
                and field.close is not None
            ):
                return (
                    ReasoningFormat(field.open.literals, field.close.literals, field.trim)
                    if field.close.literals
                    else None
                )
        return None

    def reasoning_at_end_of(self, prompt: str) -> bool:
        """Return whether the prompt ends with an anchor that opens reasoning."""
        end = len(prompt.rstrip())
        return any(
            match.end() >= end
            for field in self.fields
            if field.name in REASONING and field.open is not None
            for match in field.open.pattern.finditer(prompt)
        )


class TemplateRegions:
    """Reads an answer by a template. What is not parsed is text, with its anchors."""

    __slots__ = ("_context", "_outside", "_parse_reasoning", "_template")

    def __init__(self, context: Context, template: ResponseTemplate, *, parse_reasoning: bool) -> None:
        self._context: Final = context
        self._template: Final = template
        self._parse_reasoning: Final = parse_reasoning
        anchors = [(field.open, field) for field in template.fields if field.open is not None]
        if template.implicit is not None and template.implicit.close is not None:
            anchors.append((template.implicit.close, template.implicit))
        self._outside: Final = anchors

    def read(self, *, inside: bool) -> Steps[None]:
        """Read the answer. `inside`: it begins inside reasoning."""
        out = self._context.out
        if inside:
            thinking = next(
                (candidate for candidate in self._template.fields if candidate.name in REASONING), None
            )
            if thinking is not None:
                yield from self._read_region(thinking, {}, "")
        while anchor_match := (yield from self._copy_until(self._outside, out.text.write)):
            match, field = anchor_match
            if field is self._template.implicit:
                out.text.drop_held()
            else:
                captures = {name: text for name, text in match.groupdict().items() if text is not None}
                yield from self._read_region(field, captures, match.group())
        if not out.calls or out.text.written:
            out.text.keep_held()

    def _read_region(self, field: TemplateField, captures: Mapping[str, str], opened: str) -> Steps[None]:
        out = self._context.out
        anchors = [(field.close, field)] if field.close is not None else []
        if field.name == CALLS and self._context.parse_tools:
            pieces: list[str] = []
            closing = yield from self._copy_until(anchors, pieces.append)
            closed = closing[0].group() if closing else ""
            if not self._write_calls(field, captures, "".join(pieces)) and closing:
                out.text.write(opened + "".join(pieces) + closed)
            return
        thinking = field.name in REASONING and self._parse_reasoning
        run = out.reasoning if thinking else out.text
        plain = field.name == CALLS or (field.name in REASONING and not thinking)
        if plain:
            out.text.write(opened)
        else:
            out.text.drop_held()
            run.start(field.trim)
        closing = yield from self._copy_until(anchors, run.write)
        if plain and closing:
            out.text.write(closing[0].group())
        elif not plain:
            run.drop_held() if closing else run.keep_held()
            out.text.start(field.trim)

    def _copy_until(
        self, anchors: "list[tuple[Anchor, TemplateField]]", write: Write
    ) -> "Steps[tuple[regex.Match[str], TemplateField] | None]":
        """Write the text up to the next anchor, and read that; None if the answer ends first.

        The leftmost anchor counts, of several the longest. What may become an anchor is held back.
        """
        reader = self._context.reader
        while True:
            text, at, ended = reader.text, reader.at, reader.ended
            best: tuple[regex.Match[str], TemplateField] | None = None
            hold = len(text)
            for anchor, field in anchors:
                match = anchor.pattern.search(text, at, partial=not ended)
                if match is None or (match.start() == match.end() and not match.partial):
                    continue
                if not ended and (match.partial or (match.end() == len(text) and anchor.extensible)):
                    hold = min(hold, match.start())
                elif best is None or (match.start(), -match.end()) < (best[0].start(), -best[0].end()):
                    best = (match, field)
            if best is not None and best[0].start() < hold:
                write(text[at : best[0].start()])
                reader.at = best[0].end()
                return best
            if hold > at:
                write(text[at:hold])
                reader.at = hold
            if ended:
                return None
            yield

    def _write_calls(self, field: TemplateField, captures: Mapping[str, str], text: str) -> bool:
        """Yield the calls of a region; return whether it has any that can be understood."""
        try:
            value = parse_content(field.content, text, field.options)
            value = transform_value(value, field.transform, field.each, captures)
            calls = [self._call(item) for item in (value if isinstance(value, list) else [value])]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, regex.error):
            return False
        for name, arguments in calls:
            self._context.out.start_call(name)
            self._context.out.write_arguments(arguments)
            self._context.out.end_call()
        if calls:
            self._context.out.text.start()
        return bool(calls)

    def _call(self, item: Any) -> tuple[str, str]:
        """Return the name and arguments of one call. Raises ValueError."""
        function = item.get("function", item)
        name, arguments = function["name"], function.get("arguments", function.get("parameters"))
        if not isinstance(name, str) or not name:
            raise ValueError("no name")
        if isinstance(arguments, str) and is_object(arguments):
            return name, arguments
        if not isinstance(arguments, dict):
            if arguments:
                raise ValueError("no arguments")
            arguments = {}
        schema = self._context.offered.get(name, {})
        typed = {key: _typed(value, types_of_parameter(schema, key)) for key, value in arguments.items()}
        return name, json.dumps(typed, ensure_ascii=False, allow_nan=False)


def _typed(value: Any, types: frozenset[str]) -> Any:
    """Cast a value that is text but was declared to be something else."""
    if isinstance(value, str) and types and types != _STRING:
        return json.loads(cast(value, types))
    return value


# Loading the `response_template` of a model's tokenizer configuration.

_TEMPLATE_KEYS: Final = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})

_FIELD_KEYS: Final = frozenset(
    {
        *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
        *("repeats", "join", "optional", "transform", "transform_each"),
    }
)


class InvalidTemplate(ValueError):
    """A `response_template` that cannot be used."""


def load_response_template(text: str) -> ResponseTemplate:
    """Read a template from JSON text. Raises `InvalidTemplate`, naming what is wrong."""
    try:
        spec = json.loads(text)
    except ValueError as error:
        raise InvalidTemplate(f"response_template is not JSON: {error}") from error
    _check("response_template", spec, _TEMPLATE_KEYS)
    if spec.get("version", 1) != 1:
        raise InvalidTemplate(
            f"response_template has version {spec['version']}; this release knows version 1"
        )
    if not isinstance(spec.get("fields"), dict) or not spec["fields"]:
        raise InvalidTemplate("response_template has no fields")
    fields = [_load_field(name, field_spec) for name, field_spec in spec["fields"].items()]
    implicit = [field for field in fields if field.open is None]
    if len(implicit) > 1:
        names = ", ".join(field.name for field in implicit)
        raise InvalidTemplate(f"response_template: only one field may lack an opening anchor, but {names} do")
    return ResponseTemplate(
        tuple(field for field in fields if field.open is not None), implicit[0] if implicit else None
    )


def _load_field(name: str, spec: Any) -> TemplateField:
    where = f"response_template: field {name!r}"
    _check(where, spec, _FIELD_KEYS)
    content, options = spec.get("content", "text"), spec.get("content_args", {})
    if content not in CONTENTS:
        raise InvalidTemplate(
            f"{where}: content {content!r} is unknown (known: {', '.join(sorted(CONTENTS))})"
        )
    if not isinstance(options, dict):
        raise InvalidTemplate(f"{where}: content_args is no object")
    if content == "xml-inline":
        pattern = _compile(where, str(options.get("tag_pattern", "")))
        if not {"key", "value"} <= set(pattern.groupindex):
            raise InvalidTemplate(f"{where}: tag_pattern needs the groups key and value")
    return TemplateField(
        name,
        _load_anchor(where, spec, "open"),
        _load_anchor(where, spec, "close"),
        content,
        options,
        spec.get("transform"),
        bool(spec.get("transform_each", False)),
    )


def _load_anchor(where: str, spec: Mapping[str, Any], key: str) -> Anchor | None:
    pattern = spec.get(f"{key}_pattern")
    literals = spec.get(key)
    if pattern is not None and literals is not None:
        raise InvalidTemplate(f"{where}: both {key} and {key}_pattern are given")
    if pattern is not None:
        return Anchor(_compile(where, str(pattern)), extensible=True)
    if literals is None:
        return None
    texts = [literals] if isinstance(literals, str) else literals
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidTemplate(f"{where}: {key} is neither text nor a list of texts")
    longest_first = sorted(texts, key=len, reverse=True)
    extensible = any(text != other and text.startswith(other) for text in texts for other in texts)
    return Anchor(_compile(where, "|".join(map(regex.escape, longest_first))), extensible, tuple(texts))


def _compile(where: str, pattern: str) -> "regex.Pattern[str]":
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise InvalidTemplate(f"{where}: pattern {pattern!r} is no regular expression: {error}") from error


def _check(where: str, spec: Any, allowed_keys: frozenset[str]) -> None:
    if not isinstance(spec, dict):
        raise InvalidTemplate(f"{where} is no object")
    if unknown := sorted(set(spec) - allowed_keys):
        raise InvalidTemplate(f"{where}: unknown keys {', '.join(unknown)}")
