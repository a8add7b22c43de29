"""A real model names the colour of a picture, with its encoder, prefill and decode together and apart on real vLLM."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.support.clients.colours import ANSWERS, answers
from tests.support.clients.encoding import encode_legs, until_it_encodes
from tests.support.engines.multimodal import colour_model
from tests.support.processes.disaggregated import handed_over
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.soak,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

FLAGS = (
    *("--engine", "vllm", "--served-model-name", "tiny", "--max-model-len", "512", "--kv-cache-mib", "128"),
    *("--prefill-workers", "1", "--decode-workers", "1", "--encode-workers", "1"),
    *("--disaggregate", "always", "--local-prefill-tokens", "31"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """One worker for each of the three."""
    flags = (*FLAGS, "--model", str(colour_model.ensure()))
    async with fleet(tmp_path_factory.mktemp("colours"), *flags, ready_s=400, vllm=True) as made:
        yield made


async def test_the_colour_is_named_together_and_apart(up: FleetProcess) -> None:
    """E/P/D; E/PD, when the prefill worker decodes too; EPD, when it is left alone. Each answer names its picture's colour, and all are the same."""
    await until_it_encodes(up)
    async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0) as client:
        [card] = (await client.models.list()).data
        # As vLLM's encoder cache has room for: at least the largest image that the model makes.
        assert card.model_dump()["limits"]["media_tokens"]["image"] >= 64

        split = await answers(client, "E/P/D")
        assert await handed_over(up) == len(ANSWERS)
        legs = await encode_legs(up)
        assert legs["computed"]
        await drain(up, "prefill-0", "decode-0")
        await ctl(up, "prefill-0", "role", "both")
        await ctl(up, "prefill-0", "resume")
        await up.until("it takes requests", lambda stats: state(stats, "prefill-0") == "ready")
        encoded = await answers(client, "E/PD")
        legs = await encode_legs(up) - legs
        assert legs["computed"]
        await drain(up, "encode-0")
        legs = await encode_legs(up)
        whole = await answers(client, "EPD")
        assert await encode_legs(up) == legs
        assert await handed_over(up) == len(ANSWERS)
    assert split == encoded == whole == ANSWERS


async def drain(up: FleetProcess, *workers: str) -> None:
    """These take no further requests, and the router is aware of that."""
    for worker in workers:
        await ctl(up, worker, "drain")
    await up.until(
        f"{workers} are drained",
        lambda stats: all(state(stats, worker) == "draining" for worker in workers),
    )


async def ctl(up: FleetProcess, *words: str) -> None:
    """A control command as a user gives it."""
    code, output = await up.command("ctl", *words)
    assert code == 0, output


def state(stats: list[dict[str, Any]], worker: str) -> str:
    """That of a worker."""
    [found] = [one["state"] for one in stats if one["name"] == "headwater-worker" and one["id"] == worker]
    return str(found)
