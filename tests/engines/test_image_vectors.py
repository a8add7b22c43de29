"""Vectors of texts with images on real engines: those of Hugging Face's implementation with the same weights."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engines.cases import VLLM_IN_EVERY_RUN, Case
from tests.support.clients.image_vectors import (
    FLAGS,
    check_blocks,
    check_rejections,
    check_vectors,
    check_videos,
)
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.processes.fleet import FleetProcess

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300), VLLM_IN_EVERY_RUN]

POOLING = {
    "vllm": ("--native=--kv-cache-memory-bytes=67108864", "--", "--runner", "pooling", "--convert", "embed"),
    "sglang": ("--sglang-native=--is-embedding",),
}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def up(case: Case, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """A worker that pools with the tiny vision model."""
    flags = ("--model", str(tiny_vision_model.ensure()), *FLAGS, *POOLING[case.engine])
    async with case.fleet(tmp_path_factory.mktemp("vectors"), *flags) as made:
        yield made


async def test_vectors_are_those_of_the_image_and_the_text(up: FleetProcess, tmp_path: Path) -> None:
    """Of the image and its place, in whatever file."""
    await check_vectors(up, tmp_path)


async def test_videos_are_told_apart(up: FleetProcess) -> None:
    """By their frames."""
    await check_videos(up)


async def test_blocks_are_found_by_their_image(up: FleetProcess) -> None:
    """Where they are cached, and by no other image."""
    await check_blocks(up)


async def test_what_it_cannot_pool_ends_no_engine(up: FleetProcess) -> None:
    """Rejected by name."""
    await check_rejections(up)
