"""A real embedding model, an encoder that attends to both sides, on real vLLM: its cosine similarities, scores and ranks are the known ones."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio

from headwater.actors.worker.handoffs import CHECK_PERIOD_S, GONE_S
from tests.support.engines.tiny_classifier import minilm
from tests.support.marks import VLLM
from tests.support.processes.fleet import FleetProcess, descendants, fleet
from tests.support.processes.stopped import StoppedProcesses

pytestmark = [*VLLM, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

TEXTS = (
    "This is an example sentence",
    "Each sentence is converted",
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "A cheetah is running behind its prey.",
)
COSINES = {(0, 1): 0.4046, (2, 3): 0.7553, (0, 2): -0.0302, (2, 4): 0.1419, (3, 4): 0.0622}
"""What transformers 5 gives for all-MiniLM-L6-v2 with mean pooling, in float32."""

CLIENTS, PROMPTS = 12, 520
"""Requests at once, and the prompts of each: eight messages of each are at the worker."""

LOADED_S = 20.0
"""What a busy machine may add to a time."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """One worker."""
    flags = ("--engine", "vllm", "--model", str(minilm()), "--served-model-name", "minilm")
    more = ("--workers", "1", "--native=--kv-cache-memory-bytes=134217728", "--busy", "prefill_tokens=0")
    async with fleet(tmp_path_factory.mktemp("minilm"), *flags, *more, ready_s=240, vllm=True) as made:
        yield made


@pytest.mark.soak
async def test_vectors_are_those_of_the_model(embedder: FleetProcess) -> None:
    """Of length one, and as similar to each other as they are known to be."""
    async with openai.AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.embeddings.create(model="minilm", input=list(TEXTS))
        vectors = np.array([one.embedding for one in answer.data])
        assert vectors.shape == (len(TEXTS), 384)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-4)
        for (one, other), cosine in COSINES.items():
            assert vectors[one] @ vectors[other] == pytest.approx(cosine, abs=5e-4)
        with pytest.raises(openai.BadRequestError, match="does not generate text"):
            await client.chat.completions.create(
                model="minilm", messages=[{"role": "user", "content": "Hello"}]
            )


@pytest.mark.soak
async def test_vectors_for_an_edge_that_died_are_not_computed(embedder: FleetProcess) -> None:
    """The engine has some minutes of work for it, and stops: the next edge's request does not wait for that.

    It stands still until its worker knows that nobody waits, so that this takes no processor time. The same with the simulated engine, in
    `test_dead_edge.py`, is in every run.
    """
    await embedder.until_whole(workers=1)
    prompt = [[1_037] * 250 for _ in range(PROMPTS)]
    async with embedder.client() as client:
        asked = [
            asyncio.create_task(client.post("/v1/embeddings", json={"model": "minilm", "input": prompt}))
            for _ in range(CLIENTS)
        ]
        placed = 7 * CLIENTS
        await embedder.until("it has all", lambda all_: any(one.get("decisions", 0) > placed for one in all_))
        engine = StoppedProcesses()
        engine.stop(*descendants(await embedder.worker_pid("worker-0")))
        try:
            embedder.kill(" edge ")
            broken = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(one, httpx.TransportError) for one in broken)
            aborted_s = GONE_S + 3 * CHECK_PERIOD_S + LOADED_S
            await embedder.until(
                "aborted", lambda _: '"orphans_aborted"' in embedder.log.read_text(), aborted_s
            )
        finally:
            engine.resume()
    await embedder.until_whole(workers=1)
    url = f"{embedder.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=LOADED_S) as client:
        assert len((await client.embeddings.create(model="minilm", input=list(TEXTS))).data) == len(TEXTS)


@pytest.mark.soak
async def test_scores_are_the_known_similarities(embedder: FleetProcess) -> None:
    """Of one text with several, and of two lists; documents are ranked by them. It has no head for classes."""
    await embedder.until_whole(workers=1)
    async with embedder.client() as client:
        body = {"model": "minilm", "text_1": TEXTS[2], "text_2": [TEXTS[3], TEXTS[4], TEXTS[2]]}
        scores = [one["score"] for one in (await client.post("/v1/score", json=body)).json()["data"]]
        assert scores == pytest.approx([COSINES[2, 3], COSINES[2, 4], 1.0], abs=5e-4)
        pairs = list(COSINES)
        lists = [[TEXTS[pair[side]] for pair in pairs] for side in (0, 1)]
        body = {"model": "minilm", "text_1": lists[0], "text_2": lists[1]}
        scores = [one["score"] for one in (await client.post("/v1/score", json=body)).json()["data"]]
        assert scores == pytest.approx([COSINES[pair] for pair in pairs], abs=5e-4)
        body = {"model": "minilm", "query": TEXTS[2], "documents": [TEXTS[0], TEXTS[4], TEXTS[3]]}
        for path in ("/v1/rerank", "/v2/rerank"):
            found = (await client.post(path, json=body)).json()["results"]
            assert [one["index"] for one in found] == [2, 1, 0]
            ranks = [one["relevance_score"] for one in found]
            assert ranks == pytest.approx([COSINES[2, 3], COSINES[2, 4], COSINES[0, 2]], abs=5e-4)
            assert [one["document"]["text"] for one in found] == [TEXTS[3], TEXTS[4], TEXTS[0]]
        refused = await client.post("/v1/classify", json={"model": "minilm", "input": TEXTS[0]})
        assert refused.status_code == 400
        assert "it pools for embed" in refused.json()["error"]["message"]
