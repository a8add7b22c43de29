"""Embeddings by the official client from `headwater up` with the simulated engine, as real processes over NATS."""

import asyncio
import math

import openai
import pytest

from tests.support.processes.fleet import FleetProcess, shared_fleet

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

TEXTS = [f"The source of river number {number} lies in the hills." for number in range(300)]


up = shared_fleet("--engine", "sim")
"""Two simulated workers."""


async def test_the_official_client_gets_vectors_for_many_texts(up: FleetProcess) -> None:
    """In order, in both encodings, equal for equal texts; and the model still chats."""
    await up.until_whole()
    async with up.official_client() as client:
        packed = await client.embeddings.create(model="sim", input=TEXTS)
        plain = await client.embeddings.create(model="sim", input=TEXTS, encoding_format="float")
        assert [entry.index for entry in packed.data] == list(range(len(TEXTS)))
        assert [entry.embedding for entry in packed.data] == [entry.embedding for entry in plain.data]
        assert all(math.isclose(math.hypot(*entry.embedding), 1.0, rel_tol=1e-5) for entry in packed.data)
        assert packed.usage.prompt_tokens == packed.usage.total_tokens > len(TEXTS)
        [one] = (await client.embeddings.create(model="sim", input=TEXTS[17], dimensions=8)).data
        assert len(one.embedding) == 8
        [again] = (await client.embeddings.create(model="sim", input=TEXTS[17])).data
        assert again.embedding == packed.data[17].embedding
        [by_tokens] = (await client.embeddings.create(model="sim", input=[5, 6, 7])).data
        assert len(by_tokens.embedding) == len(again.embedding)
        answer = await client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "hi"}], max_tokens=4
        )
        assert answer.choices[0].message.content
        await up.until(
            "nothing counts as load any more",
            lambda stats: all(s["running"] == 0 for s in stats if s["name"] == "headwater-worker"),
        )


async def test_errors_name_what_to_change(up: FleetProcess) -> None:
    """As the client's own exceptions."""
    await up.until_whole()
    async with up.official_client() as client:
        with pytest.raises(openai.BadRequestError, match="none of them empty"):
            await client.embeddings.create(model="sim", input=[])
        with pytest.raises(openai.BadRequestError, match="context is"):
            await client.embeddings.create(model="sim", input=[[5] * 300_000])
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await client.embeddings.create(model="other", input="x")
        with pytest.raises(openai.BadRequestError, match="lacks capability 'guide'"):
            await client.chat.completions.create(
                model="sim",
                messages=[{"role": "user", "content": "hi"}],
                response_format={"type": "json_object"},
            )
        with pytest.raises(openai.BadRequestError, match="no logits processor"):
            await client.chat.completions.create(
                model="sim",
                messages=[{"role": "user", "content": "hi"}],
                extra_body={"logits_processors": ["os.system"]},
            )


async def test_requests_outlive_the_worker_that_is_killed_among_them(up: FleetProcess) -> None:
    """Whoever is asked when the process dies: every request is answered, each with the right vectors."""
    await up.until_whole()
    async with up.official_client() as client:
        before = await _answered(up)
        right = [entry.embedding for entry in (await client.embeddings.create(model="sim", input=TEXTS)).data]

        async def ask(number: int) -> None:
            if number == 20:
                up.kill(" engine ")
            found = await client.embeddings.create(model="sim", input=TEXTS[number : number + 100])
            assert [entry.embedding for entry in found.data] == right[number : number + 100]

        async with asyncio.timeout(60):
            for first in range(0, 60, 6):
                await asyncio.gather(*(ask(number) for number in range(first, first + 6)))
        assert await _answered(up) == before + 61


async def _answered(up: FleetProcess) -> int:
    """Requests for embeddings that the edge has counted as answered."""
    async with up.client() as client:
        page = (await client.get("/metrics")).text
    sample = 'headwater_edge_requests_total{endpoint="embeddings",model="sim",reason="stop"} '
    return int(sum(float(line.removeprefix(sample)) for line in page.splitlines() if line.startswith(sample)))
