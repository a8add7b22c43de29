"""HTTP routes, fields and headers, from the edge's and the admin's modules."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from docs._reference.markdown import code, table
from headwater.actors import admin as admin
from headwater.actors.edge.saga import http_call
from headwater.schemas.control import COMMANDS

ROOT = Path(__file__).resolve().parent.parent.parent

ROUTES: dict[str, tuple[str, str]] = {
    "/v1/chat/completions": ("POST", "chat completion, streamed or not"),
    "/v1/completions": ("POST", "text completion, streamed or not; token ids as prompt are accepted"),
    "/v1/messages": ("POST", "Anthropic's messages, streamed or not"),
    "/v1/messages/count_tokens": ("POST", "tokens of such a request's prompt"),
    "/v1/embeddings": ("POST", "embeddings"),
    "/v1/images/generations": (
        "POST",
        "generated images, streamed or not",
    ),
    "/v1/images/files/": ("GET", "`/v1/images/files/{id}`: an image that was generated for a URL"),
    "/v1/images/edits": ("POST", "images changed as a prompt says, streamed or not; a form"),
    "/v1/images/variations": ("POST", "404 that names what to use instead"),
    "/v1/videos": (
        "GET, POST",
        "video jobs of the tenant, in pages; POST creates one. `/v1/videos/{id}` is one of them (GET, DELETE), "
        "`/v1/videos/{id}/content` its mp4 file",
    ),
    "/v1/classify": ("POST", "classification (vLLM's format)"),
    "/v1/score": ("POST", "similarity scores (vLLM's format)"),
    "/v1/rerank": ("POST", "reranking (Jina's and Cohere's format)"),
    "/v2/rerank": ("POST", "the same"),
    "/v1/audio/transcriptions": ("POST", "transcript of a recording, streamed or not; a form"),
    "/v1/audio/translations": ("POST", "the same, translated into English"),
    "/v1/responses": (
        "POST",
        "response, streamed or not; with `Upgrade: websocket` a connection for several",
    ),
    "/v1/responses/input_tokens": ("POST", "tokens of a request, counted without generating"),
    "/v1/responses/compact": ("POST", "a conversation as its user messages and a summary"),
    "/v1/responses/{id}": ("GET, DELETE", "a stored response"),
    "/v1/responses/{id}/cancel": ("POST", "400: no response runs in the background"),
    "/v1/responses/{id}/input_items": ("GET", "the input of a stored response, in pages"),
    "/v1/conversations": ("POST", "a new conversation"),
    "/v1/conversations/{id}": ("GET, POST, DELETE", "a conversation; POST replaces its metadata"),
    "/v1/conversations/{id}/items": ("GET, POST", "its items, in pages; POST adds items"),
    "/v1/conversations/{id}/items/{id}": ("GET, DELETE", "one item"),
    "/tokenize": ("POST", "token ids of a text or a conversation (vLLM's format)"),
    "/detokenize": ("POST", "text of token ids (vLLM's format)"),
    "/version": ("GET", "version of the edge"),
    "/openapi.json": ("GET", "OpenAPI document of these endpoints"),
    "/v1/models": ("GET", "models and LoRA adapters, with capabilities and limits"),
    "/v1/models/": ("GET", "`/v1/models/{model}`: one of them"),
    "/health": (
        "GET",
        "200 `ok`, or 503 with the reason as `status`: `no workers`, `not routable`, `restarting`, `draining`, `not persisting`",
    ),
    "/live": ("GET", "200 while the process serves"),
    "/metrics": ("GET", "Prometheus metrics"),
}
"""What each route does. A test compares the routes with the code."""

RESPONSE_HEADERS = {
    "x-request-id": "id of the request, for `headwater explain`",
    "x-headwater-worker": "worker that generated the answer",
    "x-headwater-omitted-tools": "types of tools that only an API's own servers run: they are not in the prompt",
    "x-headwater-cached-blocks": "blocks of the prompt that the router expected in its cache",
    "x-headwater-log-position": "log position of the decision",
    "request-id": "id of a response of Anthropic's API; also in its errors",
    "retry-after": "with 429 and 503: seconds until a retry can succeed",
}

_ROUTE = re.compile(r"/(?:v\d/[a-z/_{}]+|health|live|metrics|tokenize|detokenize|version|openapi\.json)")


def page() -> str:
    """The whole page."""
    parts = [
        "# HTTP API",
        "Errors have the format of the path's API. Unknown fields of JSON are ignored, those of forms rejected.",
        "## Routes",
        table(
            ("method", "path", ""), [(method, code(path), text) for path, (method, text) in ROUTES.items()]
        ),
        "## Request headers",
        "```text\n" + (http_call.__doc__ or "").split("\n\n", 1)[1].strip("\n") + "\n```",
        "`traceparent` and `tracestate` (W3C) are recorded with the request and passed on to its engines. `authorization` is not checked; without `x-headwater-tenant` a digest of it is the tenant.",
        "## Response headers",
        table(("header", ""), [(code(name), text) for name, text in RESPONSE_HEADERS.items()]),
        "## Request fields",
        "See [request fields](http-fields.md).",
        "## Admin API",
        "On the admin port (`--admin-port`), see [operations](../guides/operations.md#admin-api).",
        "```text\n" + (admin.__doc__ or "").split("\n\n", 1)[1].strip("\n") + "\n```",
        table(("command", ""), [(code(name), text) for name, text in COMMANDS.items()]),
    ]
    return "\n\n".join(parts)


def routes() -> set[str]:
    """Paths that the edge's application spells."""
    api = ROOT / "actors" / "edge" / "apis"
    return {
        text
        for path in (
            api / "app.py",
            api / "responses_endpoints.py",
            api / "images.py",
            api / "videos.py",
        )
        for text in _constants(path)
        if _ROUTE.fullmatch(text)
    }


def _constants(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
