"""Encode workers of vLLM and SGLang in one pool with workers of both that read embeddings."""

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.engines import cases
from tests.engines.conftest import FLAGS, Mixed, ready
from tests.support.clients.encoding import encode_legs
from tests.support.clients.media_chat import ask
from tests.support.clients.pictures import picture_url
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.engines.multimodal.vision_reference import reference_answers
from tests.support.marks import BOTH_ENGINES
from tests.support.processes.restarted import KeptProcess, kept_sglang_worker, kept_vllm_worker

VLLM, SGLANG = cases.VLLM.worker, cases.SGLANG.worker

pytestmark = [*BOTH_ENGINES, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

OF_VLLM, OF_SGLANG = "encode-vllm", "encode-sglang"
VLLM_FOR_SGLANG, SGLANG_FOR_VLLM = "encode-vllm-for-sglang", "encode-sglang-for-vllm"
"""Encode workers: two of each engine, one of which is declared to compute what the other engine's workers take."""

FOR_OTHERS = (VLLM_FOR_SGLANG, SGLANG_FOR_VLLM)

FORMAT = "--embeddings"
QUESTION = "What is this?"


@pytest_asyncio.fixture(loop_scope="package")
async def encoders(
    request: pytest.FixtureRequest, mixed: Mixed, tmp_path: Path
) -> AsyncIterator[dict[str, KeptProcess]]:
    """Those that are asked for, by name. Both serving workers are there too."""
    await mixed.until_ready()
    nats, flags = mixed.up.nats, ("--role", "encode", "--model", str(tiny_vision_model.ensure()), *FLAGS)
    kept = {
        OF_VLLM: kept_vllm_worker(tmp_path, nats, OF_VLLM, *flags),
        VLLM_FOR_SGLANG: kept_vllm_worker(tmp_path, nats, VLLM_FOR_SGLANG, *flags, FORMAT, "format=sglang"),
        OF_SGLANG: kept_sglang_worker(tmp_path, nats, OF_SGLANG, *flags),
        SGLANG_FOR_VLLM: kept_sglang_worker(tmp_path, nats, SGLANG_FOR_VLLM, *flags, FORMAT, "format=vllm"),
    }
    made = {name: kept[name] for name in request.param}
    async with AsyncExitStack() as stack:
        processes = {name: await stack.enter_async_context(opening) for name, opening in made.items()}
        everyone = {VLLM, SGLANG, *made}
        await mixed.up.until("the encode workers", lambda stats: ready(stats) == everyone, within_s=300)
        await mixed.up.until_whole(len(everyone))
        yield processes


@pytest.mark.soak
@pytest.mark.parametrize(
    "encoders",
    [
        pytest.param(FOR_OTHERS, id="of the other engine"),
        pytest.param((OF_VLLM, OF_SGLANG, *FOR_OTHERS), id="of both engines", marks=pytest.mark.soak),
    ],
    indirect=True,
)
async def test_an_encode_worker_serves_workers_of_its_embedding_format_only(
    mixed: Mixed, encoders: dict[str, KeptProcess], tmp_path: Path
) -> None:
    """By default that of its engine: where the last of a format ends, its workers encode themselves, next to encode workers of another.

    Each answer is Hugging Face's, also where one engine has encoded for the other. In every run there are only encode workers that do that:
    those that encode for their own engine are in `test_disaggregated.py`.
    """
    questions = [(picture_url(300 + number), QUESTION) for number in range(5)]
    expected = await reference_answers(tmp_path, *questions)
    asked = iter(zip(questions, expected, strict=True))
    async with mixed.up.official_client() as client:

        async def encoder_for(worker: str) -> str:
            """Who encoded the next image for this worker; "" if it did."""
            question, text = next(asked)
            before = await encode_legs(mixed.up)
            answer = await ask(client, *question, worker=worker)
            assert answer.worker.startswith(worker)
            assert answer.text == text
            legs = await encode_legs(mixed.up) - before
            if not legs:
                return ""
            code, shown = await mixed.up.command("explain", answer.request)
            assert code == 0, shown
            assert dict(legs) == {"computed": 1}, shown
            [name] = re.findall(r"computed by (\S+)\.\d+", shown)
            return str(name)

        if OF_VLLM in encoders:
            assert await encoder_for(SGLANG) in (OF_SGLANG, VLLM_FOR_SGLANG)
            assert await encoder_for(VLLM) in (OF_VLLM, SGLANG_FOR_VLLM)
            await ended(mixed, encoders, OF_SGLANG)
        assert await encoder_for(SGLANG) == VLLM_FOR_SGLANG
        if OF_VLLM in encoders:
            await ended(mixed, encoders, OF_VLLM)
        assert await encoder_for(VLLM) == SGLANG_FOR_VLLM
        await ended(mixed, encoders, SGLANG_FOR_VLLM)
        assert await encoder_for(VLLM) == ""
    # A worker that cannot use an embedding encodes the image itself, and says so.
    for log in (mixed.up.log, mixed.sglang.log):
        assert '"embedding_not_read"' not in log.read_text()


async def ended(mixed: Mixed, encoders: dict[str, KeptProcess], name: str) -> None:
    """End an encode worker, and wait until edge and router know."""
    await encoders[name].stop()

    def gone(stats: list[dict[str, Any]]) -> bool:
        return name not in ready(stats)

    stats = await mixed.up.until(f"{name} is gone", gone)
    await mixed.up.until_whole(len(ready(stats)))
