"""A real model names the colour of a picture, with its encoder, prefill and decode together and apart on real engines."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.engines.cases import SGLANG, VLLM, Case
from tests.support.clients.colours import ANSWERS, answers
from tests.support.clients.encoding import encode_legs, until_it_encodes
from tests.support.engines.multimodal import colour_model
from tests.support.processes.disaggregated import handed_over
from tests.support.processes.fleet import FleetProcess

pytestmark = [pytest.mark.soak, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

FLAGS = (
    *("--served-model-name", "tiny", "--max-model-len", "512"),
    *("--prefill-workers", "1", "--decode-workers", "1", "--encode-workers", "1"),
)
OWN = {
    "vllm": (
        "--native=--kv-cache-memory-bytes=134217728",
        "--disaggregate",
        "always",
        "--local-prefill-tokens",
        "31",
    ),
    "sglang": ("--workers", "1", "--client-policies", "kv,direct", "--embeddings", "read=true"),
}
"""SGLang's worker for all is one more; vLLM's prefill worker becomes that."""


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def up(case: Case, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """One worker for each of the three, and with SGLang one for all."""
    flags = (*FLAGS, *OWN[case.engine], "--model", str(colour_model.ensure()))
    async with case.fleet(tmp_path_factory.mktemp("colours"), *flags, ready_s=500) as made:
        await made.until_whole(3 if case is VLLM else 4, within_s=300)
        yield made


async def test_the_colour_is_named_together_and_apart(case: Case, up: FleetProcess) -> None:
    """E/P/D; E/PD; EPD, when the encode worker is drained; with SGLang EP/D, too: the same answers, which are Hugging Face's."""
    split_at, whole_at = ("", "") if case is VLLM else ("prefill-0", "worker-0")
    await until_it_encodes(up)
    async with up.official_client() as client:
        if case is VLLM:
            [card] = (await client.models.list()).data
            # As vLLM's encoder cache has room for: at least the largest image that the model makes.
            assert card.model_dump()["limits"]["media_tokens"]["image"] >= 64
        assert await answers(client, "E/P/D", split_at) == ANSWERS
        assert await handed_over(up) == len(ANSWERS)
        split = await encode_legs(up)
        assert split["computed"]
        if case is VLLM:
            await drain(up, "prefill-0", "decode-0")
            await ctl(up, "prefill-0", "role", "both")
            await ctl(up, "prefill-0", "resume")
            await up.until("it takes requests", lambda stats: state(stats, "prefill-0") == "ready")
        assert await answers(client, "E/PD", whole_at) == ANSWERS
        legs = await encode_legs(up)
        assert (legs - split)["computed"]
        await drain(up, "encode-0")
        legs = await encode_legs(up)
        assert await answers(client, "EPD", whole_at) == ANSWERS
        assert await encode_legs(up) == legs
        assert await handed_over(up) == len(ANSWERS)
        if case is SGLANG:
            assert await answers(client, "EP/D", split_at) == ANSWERS
            assert await handed_over(up) == 2 * len(ANSWERS)
            assert (await encode_legs(up))["computed"] == legs["computed"]


async def drain(up: FleetProcess, *workers: str) -> None:
    """These take no further requests, and the router is aware of that."""
    for worker in workers:
        await ctl(up, worker, "drain")
    await up.until(
        f"{workers} are drained", lambda stats: all(state(stats, worker) == "draining" for worker in workers)
    )


async def ctl(up: FleetProcess, *words: str) -> None:
    """A control command as a user gives it."""
    code, output = await up.command("ctl", *words)
    assert code == 0, output


def state(stats: list[dict[str, Any]], worker: str) -> str:
    """That of a worker."""
    [found] = [one["state"] for one in stats if one["name"] == "headwater-worker" and one["id"] == worker]
    return str(found)
