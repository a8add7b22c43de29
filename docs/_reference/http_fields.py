"""Every field of every endpoint, and what becomes of it."""

import typing
from collections.abc import Iterable

from docs._reference.markdown import code, table
from docs._reference.structs import type_name
from headwater.actors.edge.api.anthropic.field_table import ANSWER_FIELDS, HEADERS, PROMPT_FIELDS, FieldRow
from headwater.actors.edge.api.openapi import ENDPOINTS
from headwater.actors.edge.request.field_status import ApiEndpoint, statuses


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
            "See [its guide](../guides/anthropic.md). Fields of both routes:",
            _treatments(PROMPT_FIELDS),
            "Fields of `/v1/messages` only:",
            _treatments(ANSWER_FIELDS),
            "Headers:",
            _treatments(HEADERS),
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


def _treatments(rows: Iterable[FieldRow]) -> str:
    return table(("field", "", "remark"), [(code(row.field), row.treatment, row.remark) for row in rows])
