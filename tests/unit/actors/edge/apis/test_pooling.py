"""The endpoints that pool, as clients see them: shapes, what is refused, and never a 5xx for what a client sends."""

import asyncio
import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.edge.apis.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from headwater.actors.edge.tokenizer import Tokenizer
from headwater.engines.model_files import byte_tokenizer
from headwater.schemas.hashing import unpack_tokens
from headwater.schemas.inference import Embedded, EmbedReply, EmbedRequest
from tests.support.data.vectors import SIZE, vector
from tests.support.worlds.edge import EVERYTHING, EdgeWorld

EMBED, CLASSIFY, SCORE, RERANK = "/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank"
SOUND: dict[str, dict[str, Any]] = {
    EMBED: {"model": "e", "input": "hi"},
    CLASSIFY: {"model": "c", "input": "hi"},
    SCORE: {"model": "e", "text_1": "hi", "text_2": ["hi", "ho"]},
    RERANK: {"model": "e", "query": "hi", "documents": ["ho", "hi"]},
}


def pooled(request: EmbedRequest) -> EmbedReply:
    """Vectors, classes, or a score that is the number of tokens."""
    if request.task == "score":
        return Embedded(tuple(np.array([len(p) // 4], "<f4").tobytes() for p in request.prompts))
    if request.task == "classify":
        return Embedded(tuple(np.array([0.25, 0.75], "<f4").tobytes() for _ in request.prompts))
    return Embedded(tuple(vector(prompt, request.dimensions or SIZE) for prompt in request.prompts))


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    """Models that embed, classify and score, and one that does both: generate and embed."""
    with EdgeWorld() as world:
        world.pool = pooled
        world.serve("e", capabilities=frozenset({"embed"}), tasks=("embed", "token_embed"))
        world.serve("c", capabilities=frozenset({"embed"}), tasks=("classify",))
        world.serve("s", capabilities=frozenset({"embed"}), tasks=("score", "classify"))
        world.serve("both", capabilities=EVERYTHING | {"embed"})
        yield world


def ask(edge: EdgeWorld, path: str, **fields: Any) -> Any:
    edge.embedded.clear()
    response = edge.ask(path, {**SOUND[path], **fields})
    assert response.status == 200, response.body
    assert response.headers[b"x-request-id"]
    return response.document


def refused(edge: EdgeWorld, path: str, **fields: Any) -> dict[str, Any]:
    """The error of a request that is refused."""
    edge.embedded.clear()
    error = edge.refused(path, {**SOUND[path], **fields})
    assert edge.embedded == [], "an engine saw it"
    return error


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("hi", ["hi"]),
        (["hi", "h"], ["hi", "h"]),
        ([8, 9], [[8, 9]]),
        ([[8, 9], [8]], [[8, 9], [8]]),
    ],
)
def test_inputs_are_texts_or_token_ids(edge: EdgeWorld, value: Any, prompts: list[Any]) -> None:
    wanted = [byte_tokenizer().encode(one).ids if isinstance(one, str) else one for one in prompts]
    document = ask(edge, EMBED, input=value)
    [request] = edge.embedded
    assert [unpack_tokens(prompt).tolist() for prompt in request.prompts] == wanted
    assert (request.task, request.dimensions, request.segments) == ("embed", 0, ())
    assert document["object"] == "list"
    assert [(entry["object"], entry["index"]) for entry in document["data"]] == [
        ("embedding", index) for index in range(len(prompts))
    ]
    assert document["usage"]["prompt_tokens"] == sum(len(prompt) for prompt in wanted)


def test_both_encodings_are_the_same_numbers(edge: EdgeWorld) -> None:
    """Base64 is what the official client asks for."""
    plain = ask(edge, EMBED, encoding_format="float")["data"][0]["embedding"]
    packed = ask(edge, EMBED, encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == plain
    assert math.isclose(math.hypot(*plain), 1.0, rel_tol=1e-6)
    assert len(ask(edge, EMBED, dimensions=3)["data"][0]["embedding"]) == 3


@pytest.mark.parametrize(
    ("path", "field", "value", "says"),
    [
        (EMBED, "input", [], "none of them empty"),
        (EMBED, "input", "", "none of them empty"),
        (EMBED, "input", ["a", ""], "none of them empty"),
        (EMBED, "input", [[1], []], "none of them empty"),
        (EMBED, "input", ["a", [1]], "none of them empty"),
        (EMBED, "input", [1.5], "none of them empty"),
        (EMBED, "input", [True], "none of them empty"),
        (EMBED, "input", [2**70], "outside the vocabulary"),
        (EMBED, "input", ["a"] * 2049, "more than 2048"),
        (EMBED, "input", "a" * 5000, "context is 4096"),
        (EMBED, "input", [[1] * 4000] * 251, "at most 1000000"),
        (EMBED, "encoding_format", "hex", "must be one of base64, float"),
        (EMBED, "dimensions", 0, "1"),
        (EMBED, "normalize", False, "not supported"),
        (EMBED, "embed_dtype", "float16", "not supported"),
        (EMBED, "truncate_prompt_tokens", 5, "not supported"),
        (CLASSIFY, "input", [], "none of them empty"),
        (SCORE, "text_1", ["a", "b", "c"], "equal length"),
        (SCORE, "text_2", [], "none of them empty"),
        (RERANK, "documents", [], "none of them empty"),
        (RERANK, "documents", [{"title": "x"}], "objects with a text"),
        (RERANK, "top_n", -1, "0"),
    ],
)
def test_what_is_wrong_is_refused_before_an_engine_sees_it(
    edge: EdgeWorld, path: str, field: str, value: Any, says: str
) -> None:
    """By the field's name and with its limit."""
    error = refused(edge, path, **{field: value})
    assert says in error["message"]
    assert error["param"] == field


@pytest.mark.parametrize(
    ("path", "model", "says"),
    [
        (EMBED, "m", "does not pool; use /v1/chat/completions"),
        (EMBED, "c", "it pools for classify, not for embed"),
        (CLASSIFY, "e", "it pools for embed, token_embed, not for classify"),
        (SCORE, "c", "not for score or embed"),
        (RERANK, "m", "does not pool"),
    ],
)
def test_a_model_for_something_else_says_what_for(edge: EdgeWorld, path: str, model: str, says: str) -> None:
    error = refused(edge, path, model=model)
    assert says in error["message"]
    assert error["param"] == "model"


def test_a_model_may_do_both(edge: EdgeWorld) -> None:
    assert ask(edge, EMBED, model="both")["model"] == "both"
    chat = {"model": "both", "messages": [{"role": "user", "content": "hi"}]}
    assert edge.ask("/v1/chat/completions", chat).status == 200


def test_scores_of_a_model_that_embeds_are_cosines(edge: EdgeWorld) -> None:
    """Each text is embedded once, however many pairs it is in."""
    document = ask(edge, SCORE, text_1="hi", text_2=["hi", "ho", "hi"])
    scores = [entry["score"] for entry in document["data"]]
    assert math.isclose(scores[0], 1.0, rel_tol=1e-6)
    assert scores[2] == scores[0] > scores[1]
    assert [len(request.prompts) for request in edge.embedded] == [2]


def test_scores_of_a_model_that_reads_pairs_are_its_own(edge: EdgeWorld) -> None:
    document = ask(edge, SCORE, model="s", text_1=["a", "bcd"], text_2=["b", "c"])
    assert [entry["score"] for entry in document["data"]] == [2.0, 4.0]
    [request] = edge.embedded
    assert (request.task, len(request.prompts)) == ("score", 2)


def test_documents_come_best_first(edge: EdgeWorld) -> None:
    """With their places in the request; as many as wanted; their texts unless not wanted."""
    document = ask(edge, RERANK, documents=["ho", {"text": "hi"}, "hu"])
    results = document["results"]
    assert results[0]["index"] == 1
    assert results[0]["document"] == {"text": "hi"}
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert len(ask(edge, RERANK, top_n=1, return_documents=False)["results"]) == 1
    assert "document" not in ask(edge, RERANK, return_documents=False)["results"][0]
    assert edge.ask("/v2/rerank", SOUND[RERANK]).status == 200


def test_classes_are_named_as_hugging_face_names_them_by_default(edge: EdgeWorld) -> None:
    """The likeliest, and all probabilities."""
    [entry] = ask(edge, CLASSIFY)["data"]
    assert entry == {"index": 0, "label": "LABEL_1", "probs": [0.25, 0.75], "num_classes": 2}


def test_an_engine_that_gives_no_numbers_is_not_believed(edge: EdgeWorld) -> None:
    """JSON has no NaN, and null in a vector would break clients far from here."""
    edge.pool = lambda request: Embedded((np.array([math.nan], "<f4").tobytes(),) * len(request.prompts))
    try:
        assert edge.ask(EMBED, SOUND[EMBED]).status == 502
    finally:
        edge.pool = pooled


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
FIELDS = sorted(
    {*EmbeddingRequest.__struct_fields__, *ScoreRequest.__struct_fields__, *RerankRequest.__struct_fields__}
)


@pytest.mark.parametrize("path", SOUND)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), anything, max_size=3))
def test_strange_requests_are_answered_or_refused(
    edge: EdgeWorld, path: str, changes: dict[str, Any]
) -> None:
    """Never a 5xx."""
    response = edge.ask(path, json.dumps({**SOUND[path], **changes}).encode())
    assert response.status in (200, 400, 404), response.body
    if response.status != 200:
        assert response.document["error"]["message"]


def test_a_pair_tells_where_its_second_text_begins() -> None:
    """By the tokenizer's type ids: models of BERT's kind need it, others have none."""
    words = {"[CLS]": 0, "[SEP]": 1, "a": 2, "b": 3, "[UNK]": 4}
    reference = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    reference.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain = Tokenizer(reference.to_str().encode())
    reference.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    bert = Tokenizer(reference.to_str().encode())
    ids, segment = asyncio.run(bert.encode_pair("a a", "b"))
    assert (ids.tolist(), segment) == ([0, 2, 2, 1, 3, 1], 4)
    ids, segment = asyncio.run(plain.encode_pair("a", "b"))
    assert ids.tolist() == [2, 3]
    assert segment == 1
