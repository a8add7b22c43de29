"""What the table of fields says is what requests meet; the OpenAPI document is made of the same types."""

import inspect
import re
from pkgutil import resolve_name
from typing import Any

import msgspec
import pytest

from headwater import __version__
from headwater.actors.edge.apis.openapi import ENDPOINTS, openapi_document
from headwater.actors.edge.saga.fields import ApiEndpoint, field_rows
from headwater.actors.http.body import FORM
from tests.support.marks import OFFICIAL_CLIENT
from tests.support.worlds.edge import EdgeWorld

SOUND: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/responses/input_tokens": {"model": "m", "input": "hi"},
    "/v1/responses/compact": {"model": "m", "input": "hi"},
    "/v1/conversations": {},
    "/v1/embeddings": {"model": "m", "input": "hi"},
    "/v1/images/generations": {"model": "m", "prompt": "hi"},
    "/v1/videos": {"model": "m", "prompt": "hi"},
    "/v1/classify": {"model": "m", "input": "hi"},
    "/v1/score": {"model": "m", "text_1": "hi", "text_2": "hi"},
    "/v1/rerank": {"model": "m", "query": "hi", "documents": ["hi"]},
    "/v2/rerank": {"model": "m", "query": "hi", "documents": ["hi"]},
    "/tokenize": {"model": "m", "prompt": "hi"},
    "/detokenize": {"model": "m", "tokens": [1]},
}
CLIENT_SIDE = {"self", "timeout", "extra_headers", "extra_query", "extra_body", "output_format"}
"""Anthropic's client sends `output_format` as `output_config.format`."""

BY_PATH = {endpoint.path: endpoint for endpoint in ENDPOINTS}


@pytest.mark.parametrize(
    "endpoint", [one for one in ENDPOINTS if one.content != FORM], ids=lambda endpoint: endpoint.path
)
def test_rejected_fields_are_rejected_by_name_and_ignored_ones_are_not(
    edge: EdgeWorld, endpoint: ApiEndpoint
) -> None:
    """Each of them, at the endpoint itself. Those of forms: tests/unit/actors/edge/apis/audio."""
    for row in field_rows(endpoint.body):
        name, status = row.field, row.status
        if status not in ("rejected", "ignored") or not row.rule.is_whole:
            continue
        answer = edge.ask(endpoint.path, {**SOUND[endpoint.path], name: {"some": "thing"}})
        error = answer.document.get("error") or {}
        # Anthropic's errors have no field for it.
        where = str(error.get("param") or error.get("message") or "")
        named = re.split("[. ]", where)[0] == name
        assert named == (status == "rejected"), (name, answer.body)
        if status == "ignored":
            assert answer.status == 200


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_every_field_of_a_body_has_a_row_and_one_that_is_left_out_is_no_field(endpoint: ApiEndpoint) -> None:
    """The table is made of the types; what it says of a field stands at the field alone."""
    known = [field.encode_name for field in msgspec.structs.fields(endpoint.body)]
    whole = [row.field for row in field_rows(endpoint.body) if row.rule.is_whole]
    assert len(whole) == len(set(whole))
    assert set(whole) == {*known, *getattr(endpoint.body, "IGNORED", {})}
    assert not {*known} & {*getattr(endpoint.body, "IGNORED", {})}


@OFFICIAL_CLIENT
@pytest.mark.parametrize(
    ("path", "create"),
    [
        ("/v1/chat/completions", "openai.resources.chat.completions:Completions.create"),
        ("/v1/completions", "openai.resources.completions:Completions.create"),
        ("/v1/responses", "openai.resources.responses:Responses.create"),
        ("/v1/responses/input_tokens", "openai.resources.responses:InputTokens.count"),
        ("/v1/responses/compact", "openai.resources.responses:Responses.compact"),
        ("/v1/conversations", "openai.resources.conversations:Conversations.create"),
        ("/v1/audio/transcriptions", "openai.resources.audio.transcriptions:Transcriptions.create"),
        ("/v1/audio/translations", "openai.resources.audio.translations:Translations.create"),
        ("/v1/images/generations", "openai.resources.images:Images.generate"),
        ("/v1/images/edits", "openai.resources.images:Images.edit"),
        ("/v1/videos", "openai.resources.videos:Videos.create"),
        ("/v1/messages", "anthropic.resources.messages:Messages.create"),
        ("/v1/messages/count_tokens", "anthropic.resources.messages:Messages.count_tokens"),
    ],
)
def test_every_parameter_of_the_official_client_is_in_the_table(path: str, create: str) -> None:
    """A new one needs a decision: served, ignored or rejected."""
    parameters = set(inspect.signature(resolve_name(create)).parameters) - CLIENT_SIDE
    assert parameters
    assert parameters <= {row.field for row in field_rows(BY_PATH[path].body)}


def test_the_document_describes_what_is_served(edge: EdgeWorld) -> None:
    """Every path of the application; no schema has a field that is rejected or removed; references resolve."""
    document = edge.ask("/openapi.json", b"", method="GET").document
    assert document == openapi_document()
    assert document["info"]["version"] == __version__
    chat = document["components"]["schemas"]["ChatRequest"]
    assert {"messages", "model"} <= set(chat["required"])
    assert {"messages", "temperature", "tools"} <= set(chat["properties"])
    assert not {"chat_template", "lora_path", "functions"} & set(chat["properties"])
    text = str(document)
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in document["components"]["schemas"]
    posts = {path for path, methods in edge.app._routes.plain.items() if "POST" in methods}
    assert posts == {endpoint.path for endpoint in ENDPOINTS}


def test_the_version_is_told(edge: EdgeWorld) -> None:
    """As vLLM does."""
    assert edge.ask("/version", b"", method="GET").document == {"version": __version__}
    assert edge.ask("/version", {}).status == 405
    for path, allowed in (("/version", b"GET"), ("/v1/score", b"POST"), ("/v1/responses/a", b"GET, DELETE")):
        refused = edge.ask(path, b"", method="PATCH")
        assert (refused.status, refused.headers[b"allow"]) == (405, allowed)


def test_texts_become_tokens_and_tokens_texts(edge: EdgeWorld) -> None:
    """In vLLM's shape; a conversation is rendered."""
    found = edge.ask(
        "/tokenize", {"model": "m", "prompt": "aé<|im_end|>", "return_token_strs": True}
    ).document
    assert found["count"] == len(found["tokens"]) == 4
    assert found["token_strs"][0] == "a"
    assert found["max_model_len"] == 4096
    back = edge.ask("/detokenize", {"model": "m", "tokens": found["tokens"]}).document
    assert back == {"prompt": "aé<|im_end|>"}
    said = edge.ask(
        "/tokenize", {"model": "m", "messages": [{"role": "user", "content": "<|im_end|>"}]}
    ).document
    text = edge.ask("/detokenize", {"model": "m", "tokens": said["tokens"]}).document["prompt"]
    assert text == "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert said["tokens"].count(258) == 1, "what a user says is text"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": "m"}, "prompt"),
        (
            "/tokenize",
            {"model": "m", "prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            "prompt",
        ),
        ("/detokenize", {"model": "m", "tokens": [10**6]}, "tokens"),
        ("/tokenize", {"model": "m", "prompt": "a" * 10**6}, "prompt"),
        (
            "/tokenize",
            {
                "model": "m",
                "messages": [{"role": "user", "content": "a"}],
                "chat_template_kwargs": {"chat_template": "x"},
            },
            "chat_template_kwargs.chat_template",
        ),
    ],
)
def test_what_cannot_be_translated_is_refused(edge: EdgeWorld, path: str, body: Any, param: str) -> None:
    answer = edge.ask(path, body)
    assert (answer.status, answer.document["error"]["param"]) == (400, param)
