"""A real model names the colour of a picture, with its encoder, prefill and decode together and apart on real SGLang."""

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from tests.support.clients.colours import ANSWERS, answers
from tests.support.clients.encoding import encode_legs, until_it_encodes
from tests.support.engines.multimodal import colour_model
from tests.support.processes.disaggregated import handed_over
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.soak,
    pytest.mark.xdist_group("sglang"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]

FLAGS = (
    *("--engine", "sglang", "--served-model-name", "tiny", "--max-model-len", "512"),
    *("--workers", "1", "--prefill-workers", "1", "--decode-workers", "1", "--encode-workers", "1"),
    *("--client-policies", "kv,direct", "--reads-embeddings"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """One worker for each of the three, and one for all."""
    flags = (*FLAGS, "--model", str(colour_model.ensure()))
    async with fleet(tmp_path_factory.mktemp("colours"), *flags, ready_s=500, sglang=True) as made:
        await made.until_whole(4, within_s=300)
        yield made


async def test_the_colour_is_named_together_and_apart(up: FleetProcess) -> None:
    """E/P/D, E/PD and, without the encode worker, EPD and EP/D: the same answers, which are Hugging Face's."""
    await until_it_encodes(up)
    async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0) as client:
        assert await answers(client, "E/P/D", "prefill-0") == ANSWERS
        assert await handed_over(up) == len(ANSWERS)
        split = await encode_legs(up)
        assert split["computed"]
        assert await answers(client, "E/PD", "worker-0") == ANSWERS
        legs = await encode_legs(up)
        assert (legs - split)["computed"]
        code, output = await up.command("ctl", "encode-0", "drain")
        assert code == 0, output
        await up.until_whole(3)
        assert await answers(client, "EPD", "worker-0") == ANSWERS
        assert await handed_over(up) == len(ANSWERS)
        assert await answers(client, "EP/D", "prefill-0") == ANSWERS
        assert await handed_over(up) == 2 * len(ANSWERS)
        assert (await encode_legs(up))["computed"] == legs["computed"]
