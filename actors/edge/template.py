"""Chat templates, rendered as Hugging Face renders them but without importing it.

Jinja2 in its immutable sandbox: a template comes with a model and is not trusted. Values reach it as plain
JSON types only.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headwater.actors.edge.errors import bad_request


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; serving passes it through."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One model's template, compiled once. `special_tokens` such as bos_token are variables in it."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        # Not at compile time: `9 ** 9 ** 9` in a template would be computed there, without any bound.
        environment.optimized = False
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"its chat template is not usable: {error}") from error
        self._special_tokens = special_tokens

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; `variables` are further ones for the template.

        Raises `ApiError` 400 with the template's own complaint.
        """
        ours = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            # As one dictionary: a client may name a variable anything.
            return self._template.render({**self._special_tokens, **(variables or {}), **ours})
        except jinja2.TemplateError as error:
            raise bad_request(
                f"The model's chat template refused the messages: {error}", param="messages"
            ) from error
        except Exception as error:  # a template can fail in any way, and it fails on what the client sent
            raise bad_request(
                f"The model's chat template cannot render these messages: {error}", param="messages"
            ) from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)
