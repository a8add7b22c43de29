"""Heads for classes on real vLLM: shares of classes and scores of pairs are those of Hugging Face's implementation with the same weights."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.engines import tiny_classifier
from tests.support.engines.tiny_classifier import reference_logits
from tests.support.processes.fleet import fleet

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(300)]

QUERY = "Which animal runs the fastest?"
TEXTS = (
    "A cheetah is running behind its prey.",
    "A man is eating a piece of bread.",
    "Bread",
    "The cheetah, the fastest animal on land, reaches a hundred kilometres per hour within three seconds.",
)
TOLERANCE = 1e-4


@asynccontextmanager
async def classifier(folder: Path, classes: int) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a worker whose model has so many classes."""
    model = ("--model", str(tiny_classifier.ensure(classes)), "--served-model-name", "classes")
    more = ("--engine", "vllm", "--workers", "1", "--native=--kv-cache-memory-bytes=67108864")
    async with fleet(folder, *model, *more, ready_s=240, vllm=True) as up, up.client() as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    """The answer to a request."""
    response = await client.post(path, json={"model": "classes", **body})
    assert response.status_code == 200, response.text
    return response.json()


def sigmoid(logits: list[list[float]]) -> list[float]:
    """The scores for logits of one class."""
    return [float(1 / (1 + np.exp(-one))) for [one] in logits]


@pytest.mark.soak
async def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    """Its tokens have types, by which it distinguishes the texts of a pair; pairs of any lengths share a batch with texts."""
    pairs = [[QUERY, text] for text in TEXTS]
    other_inputs = [*([text, QUERY] for text in TEXTS), *([text] for text in TEXTS)]
    scores = sigmoid(await reference_logits(tmp_path, 1, [*pairs, *other_inputs]))
    count = len(TEXTS)
    expected, swapped, alone = scores[:count], scores[count : 2 * count], scores[2 * count :]
    untyped = sigmoid(await reference_logits(tmp_path, 1, pairs, typed=False))
    assert all(abs(one - other) > 10 * TOLERANCE for one, other in zip(expected, untyped, strict=True))
    async with classifier(tmp_path, 1) as client:
        found = await post(client, "/v1/score", text_1=QUERY, text_2=list(TEXTS))
        assert [one["score"] for one in found["data"]] == pytest.approx(expected, abs=TOLERANCE)
        found = await post(client, "/v1/score", text_1=list(TEXTS), text_2=[QUERY] * len(TEXTS))
        assert [one["score"] for one in found["data"]] == pytest.approx(swapped, abs=TOLERANCE)
        order = sorted(range(len(TEXTS)), key=lambda number: -expected[number])
        found = await post(client, "/v1/rerank", query=QUERY, documents=list(TEXTS), top_n=3)
        assert [one["index"] for one in found["results"]] == order[:3]
        ranks = [one["relevance_score"] for one in found["results"]]
        assert ranks == pytest.approx([expected[number] for number in order[:3]], abs=TOLERANCE)
        found = await post(client, "/v1/classify", input=list(TEXTS))
        assert [one["probs"] for one in found["data"]] == [
            pytest.approx([share], abs=TOLERANCE) for share in alone
        ]
        refused = await client.post("/v1/embeddings", json={"model": "classes", "input": QUERY})
        assert refused.status_code == 400
        assert "it pools for classify" in refused.json()["error"]["message"]


@pytest.mark.soak
async def test_a_classifier_gives_the_shares_of_its_classes(tmp_path: Path) -> None:
    """They sum to one, and the label is that of the largest; several classes are no score."""
    logits = np.array(await reference_logits(tmp_path, 3, [[text] for text in TEXTS]))
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    async with classifier(tmp_path, 3) as client:
        found = (await post(client, "/v1/classify", input=list(TEXTS)))["data"]
        shares = np.array([one["probs"] for one in found])
        assert np.abs(shares - expected).max() < TOLERANCE
        assert [one["label"] for one in found] == [f"LABEL_{number}" for number in expected.argmax(axis=1)]
        assert {one["num_classes"] for one in found} == {3}
        refused = await client.post(
            "/v1/score", json={"model": "classes", "text_1": QUERY, "text_2": TEXTS[0]}
        )
        assert refused.status_code == 400
        assert "not for score" in refused.json()["error"]["message"]
