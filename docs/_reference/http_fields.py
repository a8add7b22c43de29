"""Every field of every endpoint, and what becomes of it."""

import typing
from collections.abc import Iterable

import msgspec

from docs._reference.markdown import code, table
from docs._reference.structs import type_name
from headwater.actors.edge.apis.anthropic.types import (
    ANSWER_FIELDS,
    HEADERS,
    PROMPT_FIELDS,
    FieldRow,
)
from headwater.actors.edge.apis.openapi import ENDPOINTS
from headwater.actors.edge.apis.responses import types
from headwater.actors.edge.saga.fields import ApiEndpoint, statuses


def page() -> str:
    """The whole page."""
    return "\n\n".join(
        [
            "# HTTP request fields",
            "Of each endpoint, every field that it knows. *Served*: it has the effect that its API documents. *Ignored*:"
            " accepted, without effect. *Rejected*: 400 with the field's name, because leaving it out would change the"
            " answer. *Removed*: a field of the fleet's own, which clients cannot set. Fields that are not listed are"
            " ignored. Some served fields need a capability of the model's engine and are rejected by name without it:"
            " `GET /v1/models` lists the capabilities.",
            *(_section(endpoint) for endpoint in ENDPOINTS),
            "## Anthropic's Messages API",
            "Parts and values of its fields, and its headers. See [its guide](../guides/anthropic.md).",
            _treatments(row for row in (*PROMPT_FIELDS, *ANSWER_FIELDS) if row.remark or not row.is_at_top),
            _treatments(HEADERS),
            "## Responses API",
            "Parts and values of its fields. See [its guide](../guides/responses.md). Null is the same as leaving a field"
            " out; a rejected field is also accepted in a value that changes nothing.",
            _with_values(row for row in types.CREATE_FIELDS if row.remark or "." in row.field),
            "Further fields of `response.create` over WebSocket:",
            _with_values(types.SOCKET_FIELDS),
        ]
    )


def _section(endpoint: ApiEndpoint) -> str:
    hints = typing.get_type_hints(endpoint.body)
    rows = [
        (
            code(name),
            code(type_name(hints[name])) if name in hints and status == "served" else "",
            status,
            remark,
        )
        for name, (status, remark) in statuses(endpoint).items()
    ]
    heads = ("field", "type", "status", "remark")
    return f"## {endpoint.method} {endpoint.path}\n\n{table(heads, rows)}"


def _with_values(rows: Iterable[types.ResponseField]) -> str:
    return table(
        ("field", "", "accepted values", "remark"),
        [
            (
                code(row.field),
                row.treatment,
                ", ".join(code(msgspec.json.encode(value).decode()) for value in row.neutral),
                row.remark,
            )
            for row in rows
        ],
    )


def _treatments(rows: Iterable[FieldRow]) -> str:
    return table(("field", "", "remark"), [(code(row.field), row.treatment, row.remark) for row in rows])
