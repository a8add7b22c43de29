"""Conversations to pool, with their media: what workers get, where they are sent, and what is refused by name."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headwater.actors.edge.saga.placement import TokenSequence
from headwater.actors.media.intake import MediaIntake
from headwater.engines.sim.model import media_support
from headwater.schemas.hashing import unpack_tokens
from headwater.schemas.inference import Embedded, EmbedReply, EmbedRequest
from tests.support.clients.media_chat import content
from tests.support.clients.pictures import HEIGHT, WIDTH, picture_url
from tests.support.clients.sim_images import TOKENS
from tests.support.data.vectors import vector
from tests.support.media.embeddings import embedding_file, embedding_part
from tests.support.worlds.edge import EdgeWorld

PATH = "/v1/embeddings"
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    """A model that pools text and media, and one that pools text."""
    with EdgeWorld(intake=MediaIntake()) as world:
        world.pool = pooled
        able = frozenset({"embed", "kv_events"})
        world.serve("sees", capabilities=able | {"images", "videos", "audio"}, media=media_support())
        world.serve("reads", capabilities=able)
        yield world


def pooled(request: EmbedRequest) -> EmbedReply:
    return Embedded(tuple(vector(prompt) for prompt in request.prompts))


def turn(*parts: str) -> Messages:
    return [{"role": "user", "content": content(*parts)}]


def ask(edge: EdgeWorld, messages: list[Any], **fields: Any) -> Any:
    edge.embedded.clear()
    edge.queries.clear()
    response = edge.ask(PATH, {"model": "sees", "messages": messages, **fields})
    assert response.status == 200, response.body
    return response.document


def rendered(edge: EdgeWorld, messages: Messages, **fields: Any) -> list[int]:
    """The tokens of a conversation as /tokenize counts them, without a generation prompt unless `fields` ask for one."""
    fields = {"add_generation_prompt": False, **fields}
    tokens: list[int] = edge.ask("/tokenize", {"model": "sees", "messages": messages, **fields}).document[
        "tokens"
    ]
    return tokens


def test_a_conversation_is_one_prompt_with_its_media(edge: EdgeWorld) -> None:
    """As a chat's: placeholder tokens repeated, ids in the place of pixels, which workers fetch from this edge, and blocks to route by."""
    messages = turn("What is this?", picture_url(1))
    document = ask(edge, messages)
    [request] = edge.embedded
    [[item]] = request.media
    tokens = rendered(edge, messages)
    assert unpack_tokens(request.prompts[0]).tolist() == tokens
    assert (item.kind, item.shape, item.data, item.tokens) == ("image", (HEIGHT, WIDTH, 3), b"", TOKENS)
    assert set(tokens[item.start : item.start + TOKENS]) == {media_support().placeholders["image"]}
    assert request.task == "embed"
    assert request.waiter is not None
    assert request.waiter.edge == "e1"
    assert document["usage"]["prompt_tokens"] == len(tokens)
    assert np.array(document["data"][0]["embedding"], "<f4").tobytes() == vector(request.prompts[0])
    [query] = edge.queries
    assert query.constraints.needs == ("embed", "images")
    assert query.constraints.media_processor
    expected = TokenSequence(np.array(tokens, np.uint32), 16, "", "", [item])
    assert query.hashes == expected.extend([])[1] != b""
    ask(edge, turn("What is this?", picture_url(2)))
    assert edge.embedded[0].prompts == request.prompts
    assert edge.embedded[0].media[0][0].id != item.id
    assert edge.queries[0].hashes != query.hashes


def test_several_conversations_are_as_many_vectors_in_their_order(edge: EdgeWorld) -> None:
    """Each is placed where its own blocks are; text needs no images of its worker."""
    conversations = [
        turn(picture_url(1)),
        turn("a river"),
        [*turn("a"), {"role": "assistant", "content": "b"}],
    ]
    document = ask(edge, conversations)
    vectors = {request.prompts: vector(request.prompts[0]) for request in edge.embedded}
    assert len(vectors) == len(edge.queries) == 3
    assert [bool(query.constraints.media_processor) for query in edge.queries].count(True) == 1
    assert sorted(query.constraints.needs for query in edge.queries) == [
        ("embed",),
        ("embed",),
        ("embed", "images"),
    ]
    for messages, entry in zip(conversations, document["data"], strict=True):
        wanted = rendered(edge, messages)
        [found] = [one for [one] in vectors if unpack_tokens(one).tolist() == wanted]
        assert np.array(entry["embedding"], "<f4").tobytes() == vector(found)


def test_the_template_is_told_what_vllm_tells_it(edge: EdgeWorld) -> None:
    """No generation prompt unless asked for; a last message may be left open."""
    open_, more = {"continue_final_message": True}, {"add_generation_prompt": True}
    messages = [*turn("Tell me more"), {"role": "assistant", "content": "Rivers"}]
    lengths = []
    for fields in (open_, dict[str, bool](), more):
        ask(edge, messages, **fields)
        lengths.append(len(edge.embedded[0].prompts[0]))
        assert unpack_tokens(edge.embedded[0].prompts[0]).tolist() == rendered(edge, messages, **fields)
    assert lengths == sorted(set(lengths))


@pytest.mark.parametrize(
    ("fields", "param", "code", "says"),
    [
        ({"messages": []}, "messages", None, "length >= 1"),
        ({"messages": [[]]}, "messages", None, "none of them empty"),
        ({"messages": [turn("a"), turn("b")[0]]}, "messages", None, "a list of such lists"),
        ({"messages": [turn("a")] * 129}, "messages", None, "more than 128 conversations"),
        ({"messages": None}, "input", None, "one of input and messages"),
        ({"input": "a"}, "input", None, "one of input and messages"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            None,
            "cannot both be true",
        ),
        (
            {"chat_template_kwargs": {"chat_template": "x"}},
            "chat_template_kwargs.chat_template",
            None,
            "operator",
        ),
        (
            {"model": "reads", "messages": turn(picture_url(1))},
            "messages[0].content[0].image_url",
            "media_not_taken",
            "reads takes text only",
        ),
        (
            {"messages": [turn("a"), turn("b", "data:image/png;base64,aGVsbG8=")]},
            "messages[1][0].content[1].image_url",
            "media_unknown_type",
            "",
        ),
        (
            {"messages": [turn(picture_url(1))] * 17},
            "messages[16][0].content[0].image_url",
            "too_many_images",
            "17 images; a request may have at most 16",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [embedding_part(embedding_file(np.ones((4, 8), "<f4")))]}
                ]
            },
            "messages[0].content[0].image_embeds",
            "media_embeddings_not_allowed",
            "send the images",
        ),
        ({"messages": turn("a" * 5_000)}, "messages", "context_length_exceeded", "context is 4096"),
    ],
)
def test_what_cannot_be_pooled_is_refused_by_name(
    edge: EdgeWorld, fields: dict[str, Any], param: str, code: str | None, says: str
) -> None:
    """Before an engine sees it."""
    edge.embedded.clear()
    response = edge.ask(PATH, {"model": "sees", "messages": turn("a"), **fields})
    assert response.status == 400, response.body
    error = response.document["error"]
    assert edge.embedded == []
    assert says in error["message"]
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"input": "an <|image|>"}),
        (PATH, {"input": [[5, media_support().placeholders["video"]]]}),
        ("/v1/score", {"text_1": "a", "text_2": "<|audio|>"}),
    ],
)
def test_a_place_without_its_item_reaches_no_engine(edge: EdgeWorld, path: str, body: dict[str, Any]) -> None:
    """Engines end on it: spelled in a text, or as a token id."""
    edge.embedded.clear()
    response = edge.ask(path, {"model": "sees", **body})
    assert response.status == 400, response.body
    assert "that stands for" in response.document["error"]["message"]
    assert edge.embedded == []
