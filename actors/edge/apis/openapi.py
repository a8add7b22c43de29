"""The endpoints with a body as one table, and the OpenAPI document that is made of it."""

from typing import Any, Final, get_type_hints

import msgspec

from headwater import __version__
from headwater.actors.edge.apis.anthropic_types import CountTokensRequest, MessagesRequest
from headwater.actors.edge.apis.audio import FORM, TranscriptionForm, TranslationForm
from headwater.actors.edge.apis.chat import DetokenizeRequest, TokenizeRequest
from headwater.actors.edge.apis.chat_types import ChatRequest, CompletionRequest
from headwater.actors.edge.apis.images import ImageEditForm, ImagesRequest
from headwater.actors.edge.apis.pooling import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from headwater.actors.edge.apis.responses_types import (
    CompactFields,
    ConversationFields,
    CreateFields,
    InputFields,
)
from headwater.actors.edge.apis.videos import VideoFields
from headwater.actors.edge.saga.fields import ApiEndpoint, field_rows

ENDPOINTS: Final = (
    ApiEndpoint("POST", "/v1/chat/completions", "chat completion", ChatRequest),
    ApiEndpoint("POST", "/v1/completions", "text completion", CompletionRequest),
    ApiEndpoint("POST", "/v1/messages", "message in Anthropic's format", MessagesRequest),
    ApiEndpoint("POST", "/v1/messages/count_tokens", "tokens of such a request's prompt", CountTokensRequest),
    ApiEndpoint("POST", "/v1/responses", "response", CreateFields),
    ApiEndpoint("POST", "/v1/responses/input_tokens", "tokens of such a request's prompt", InputFields),
    ApiEndpoint("POST", "/v1/responses/compact", "compacted conversation", CompactFields),
    ApiEndpoint("POST", "/v1/conversations", "stored conversation", ConversationFields, body_required=False),
    ApiEndpoint("POST", "/v1/embeddings", "embeddings", EmbeddingRequest),
    ApiEndpoint("POST", "/v1/classify", "classification", ClassifyRequest),
    ApiEndpoint("POST", "/v1/score", "similarity of pairs", ScoreRequest),
    ApiEndpoint("POST", "/v1/rerank", "documents by relevance", RerankRequest),
    ApiEndpoint("POST", "/v2/rerank", "documents by relevance", RerankRequest),
    ApiEndpoint(
        "POST", "/v1/audio/transcriptions", "transcript of a recording", TranscriptionForm, content=FORM
    ),
    ApiEndpoint("POST", "/v1/audio/translations", "transcript in English", TranslationForm, content=FORM),
    ApiEndpoint("POST", "/v1/images/generations", "generated images", ImagesRequest),
    ApiEndpoint("POST", "/v1/images/edits", "changed images", ImageEditForm, content=FORM),
    ApiEndpoint("POST", "/v1/videos", "video job", VideoFields),
    ApiEndpoint("POST", "/tokenize", "token ids of a prompt", TokenizeRequest),
    ApiEndpoint("POST", "/detokenize", "text of token ids", DetokenizeRequest),
)

_ERROR: Final[dict[str, Any]] = {"description": "the request is refused; the body says why"}


def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1. Fields that are rejected or removed are left out of the schemas."""
    bodies = {endpoint.path: _known_body(endpoint) for endpoint in ENDPOINTS}
    schemas, components = msgspec.json.schema_components(
        bodies.values(), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for endpoint, schema in zip(ENDPOINTS, schemas, strict=True):
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = {
            "summary": endpoint.summary,
            "requestBody": {
                "required": endpoint.body_required,
                "content": {endpoint.content: {"schema": schema}},
            },
            "responses": {"200": {"description": "the answer"}, "4XX": _ERROR, "5XX": _ERROR},
        }
    for path, summary in (("/v1/models", "served models"), ("/version", "version of this edge")):
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": "the answer"}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headwater", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _known_body(endpoint: ApiEndpoint) -> type[msgspec.Struct]:
    """The body's type with the fields that have an effect. The others have no JSON form."""
    left_out = {
        row.field for row in field_rows(endpoint.body) if row.rule.is_whole and row.status != "served"
    }
    types = get_type_hints(endpoint.body, include_extras=True)
    fields = [
        (field.name, types[field.name], field.default)
        if field.default is not msgspec.NODEFAULT
        else (field.name, types[field.name])
        for field in msgspec.structs.fields(endpoint.body)
        if field.encode_name not in left_out
    ]
    name = endpoint.body.__name__ if not endpoint.path.startswith("/v2") else f"{endpoint.body.__name__}V2"
    doc = {"__doc__": endpoint.body.__doc__}
    return msgspec.defstruct(name, fields, kw_only=True, namespace=doc)
