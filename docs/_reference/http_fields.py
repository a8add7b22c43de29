"""Every field of every endpoint, and what becomes of it."""

import typing
from collections.abc import Iterable

import msgspec

from docs._reference.markdown import code, table
from docs._reference.structs import type_name
from headwater.actors.edge.apis.anthropic_types import HEADERS
from headwater.actors.edge.apis.openapi import ENDPOINTS
from headwater.actors.edge.apis.responses_socket import CreateEvent
from headwater.actors.edge.apis.responses_types import CreateFields
from headwater.actors.edge.saga.fields import ApiEndpoint, FieldRow, field_rows

_HEADS: typing.Final = ("field", "type", "status", "remark")


def page() -> str:
    """The whole page."""
    known = field_rows(CreateFields)
    return "\n\n".join(
        [
            "# HTTP request fields",
            "Of each endpoint, every field that it knows, and parts of fields that there is something to say about."
            " *Served*: it has the effect that its API documents. *Ignored*:"
            " accepted, without effect. *Rejected*: 400 with the field's name, because leaving it out would change the"
            " answer. *Removed*: a field of the fleet's own, which clients cannot set. Fields that are not listed are"
            " ignored. Of the Responses API, null is the same as leaving a field out. Some served fields need a capability of the model's"
            " engine and are rejected by name without it: `GET /v1/models` lists the capabilities."
            " See the guides to [Anthropic's API](../guides/anthropic.md) and the"
            " [Responses API](../guides/responses.md).",
            *(_section(endpoint) for endpoint in ENDPOINTS),
            "## Headers of Anthropic's Messages API",
            table(
                ("header", "status", "remark"),
                [(code(name), rule.status, rule.remark) for name, rule in HEADERS.items()],
            ),
            "## `response.create` over WebSocket",
            "The fields of POST /v1/responses, and:",
            _rows(CreateEvent, (row for row in field_rows(CreateEvent) if row not in known)),
        ]
    )


def _section(endpoint: ApiEndpoint) -> str:
    return f"## {endpoint.method} {endpoint.path}\n\n{_rows(endpoint.body, field_rows(endpoint.body))}"


def _rows(body: type[msgspec.Struct], rows: Iterable[FieldRow]) -> str:
    hints = typing.get_type_hints(body)
    return table(
        _HEADS,
        [
            (
                code(row.field),
                code(type_name(hints[row.name])) if row.status == "served" and not row.rule.part else "",
                row.status,
                row.remark,
            )
            for row in rows
        ],
    )
