"""HTTP routes, fields and headers, from the edge's and the admin's modules."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from docs._reference.markdown import code, table
from docs._reference.structs import fields
from headwater.actors.admin import app as admin
from headwater.actors.edge.api import pooling_types
from headwater.actors.edge.api.anthropic.field_table import ANSWER_FIELDS, HEADERS, PROMPT_FIELDS, FieldRow
from headwater.actors.edge.api.openai import types as openai_types
from headwater.actors.edge.request import routing_hints
from headwater.actors.edge.request.fields import NEUTRAL_VALUES, ReservedFields, UnsupportedFields
from headwater.schemas.messages.control import COMMANDS

ROOT = Path(__file__).resolve().parent.parent.parent

ROUTES: dict[str, tuple[str, str]] = {
    "/v1/chat/completions": ("POST", "chat completion, streamed or not"),
    "/v1/completions": ("POST", "text completion, streamed or not; token ids as prompt are accepted"),
    "/v1/messages": ("POST", "Anthropic's messages, streamed or not"),
    "/v1/messages/count_tokens": ("POST", "tokens of such a request's prompt"),
    "/v1/embeddings": ("POST", "embeddings"),
    "/v1/classify": ("POST", "classification (vLLM's format)"),
    "/v1/score": ("POST", "similarity scores (vLLM's format)"),
    "/v1/rerank": ("POST", "reranking (Jina's and Cohere's format)"),
    "/v2/rerank": ("POST", "the same"),
    "/v1/models": ("GET", "models and LoRA adapters, with capabilities and limits"),
    "/v1/models/": ("GET", "`/v1/models/{model}`: one of them"),
    "/health": (
        "GET",
        "200 `ok`, or 503 with the reason as `status`: `no workers`, `restarting`, `draining`, `not persisting`",
    ),
    "/live": ("GET", "200 while the process serves"),
    "/metrics": ("GET", "Prometheus metrics"),
}
"""What each route does. A test compares the routes with the code."""

RESPONSE_HEADERS = {
    "x-request-id": "id of the request, for `headwater explain`",
    "x-headwater-worker": "worker that generated the answer",
    "x-headwater-cached-blocks": "blocks of the prompt that the router expected in its cache",
    "x-headwater-log-position": "log position of the decision",
    "request-id": "id of a response of Anthropic's API; also in its errors",
    "retry-after": "with 429 and 503: seconds until a retry can succeed",
}

_BODIES = (
    openai_types.ChatRequest,
    openai_types.CompletionRequest,
    pooling_types.EmbeddingRequest,
    pooling_types.ClassifyRequest,
    pooling_types.ScoreRequest,
    pooling_types.RerankRequest,
)
_ROUTE = re.compile(r"/(?:v\d/[a-z/_]+|health|live|metrics)")


def page() -> str:
    """The whole page."""
    hidden = set(ReservedFields.__struct_fields__) | set(UnsupportedFields.__struct_fields__)
    parts = [
        "# HTTP API",
        "Errors have the format of the path's API. Unknown fields are ignored; fields in the last tables are rejected or removed.",
        "## Routes",
        table(
            ("method", "path", ""), [(method, code(path), text) for path, (method, text) in ROUTES.items()]
        ),
        "## Request headers",
        "```text\n" + (routing_hints.__doc__ or "").split("\n\n", 1)[1].strip("\n") + "\n```",
        "`traceparent` (W3C) is recorded with the request's events. `authorization` is not checked; without `x-headwater-tenant` a digest of it is the tenant.",
        "## Response headers",
        table(("header", ""), [(code(name), text) for name, text in RESPONSE_HEADERS.items()]),
        "## Request fields",
        *(_body(struct, hidden) for struct in _BODIES),
        "### Anthropic's Messages API",
        "See [its guide](../guides/anthropic.md). Fields of both routes:",
        _treatments(PROMPT_FIELDS),
        "Fields of `/v1/messages` only:",
        _treatments(ANSWER_FIELDS),
        "Headers:",
        _treatments(HEADERS),
        "## Rejected fields",
        "A value other than those listed changes the answer and is rejected with 400.",
        table(
            ("field", "accepted values"),
            [
                (
                    code(name),
                    ", ".join("absent" if v is None else code(repr(v).replace("'", '"')) for v in values),
                )
                for name, values in NEUTRAL_VALUES.items()
            ],
        ),
        "## Removed fields",
        "Fields that only the fleet may set. They are removed and counted in `headwater_edge_stripped_fields_total`.",
        ", ".join(code(name) for name in sorted(set(ReservedFields.__struct_fields__) - {"extra_body"})),
        "## Admin API",
        "On the admin port (`--admin-port`), see [operations](../guides/operations.md#admin-api).",
        "```text\n" + (admin.__doc__ or "").split("\n\n", 1)[1].strip("\n") + "\n```",
        table(("command", ""), [(code(name), text) for name, text in COMMANDS.items()]),
    ]
    return "\n\n".join(parts)


def _treatments(rows: Iterable[FieldRow]) -> str:
    return table(("field", "", "remark"), [(code(row.field), row.treatment, row.remark) for row in rows])


def routes() -> set[str]:
    """Paths that the edge's application spells."""
    return {
        text for text in _constants(ROOT / "actors" / "edge" / "api" / "app.py") if _ROUTE.fullmatch(text)
    }


def _constants(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _body(struct: type[msgspec.Struct], hidden: set[str]) -> str:
    title = (struct.__doc__ or "").strip().splitlines()[0].rstrip(".")
    rows = [row for row in fields(struct) if row[0].strip("`") not in hidden]
    return f"### {title}\n\n{table(('field', 'type', 'default'), rows)}"
