"""Videos by the official client from `headwater up` with a real pipeline of diffusers on CPUs, and `kill -9` in the middle."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import av
import openai
import pytest
import pytest_asyncio
from openai.types import Video

from tests.support.engines.diffusion import tiny_video_pipeline
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [
    pytest.mark.processes,
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    # OpenAI ends its own service; the client's methods work with others.
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
]

SIDE = tiny_video_pipeline.SIDE
FPS = 8
ORDER: dict[str, Any] = {
    "model": "tiny",
    "prompt": "a red fox",
    "size": f"{SIDE}x{SIDE}",
    "seconds": "1",
    "extra_body": {"seed": 11, "steps": 3},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    return await asyncio.to_thread(tiny_video_pipeline.make, tmp_path_factory.mktemp("model") / "tiny")


@asynccontextmanager
async def workers(count: int, folder: Path, pipeline: Path) -> AsyncIterator[FleetProcess]:
    """A fleet with so many workers."""
    engine = f'{{"device": "cpu", "threads": 1, "fps": {FPS}, "steps_max": 1000, "seconds_max": 2}}'
    flags = ("--engine", "diffusers", "--model", str(pipeline), "--workers", str(count))
    async with fleet(folder, *flags, "--engine-options", engine, ready_s=240, vllm=True) as made:
        yield made


async def polled(client: openai.AsyncOpenAI, id_: str) -> Video:
    """A job, once it has ended."""
    async with asyncio.timeout(240):
        while True:
            video = await client.videos.retrieve(id_)
            if video.status in ("completed", "failed"):
                return video
            await asyncio.sleep(0.1)


def shown(data: bytes) -> tuple[str, int, int, int, float]:
    """Codec, width, height, frames and frames per second of a file."""
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        rate = stream.average_rate
        assert rate is not None
        frames = sum(1 for _ in container.decode(video=0))
        return stream.codec_context.name, stream.width, stream.height, frames, float(rate)


async def test_videos_by_the_official_client(tmp_path: Path, pipeline: Path) -> None:
    """Created, polled, listed, downloaded and deleted; the same seed gives the same file. What cannot be done is named."""
    async with workers(1, tmp_path, pipeline) as up, up.official_client() as client:
        created = await client.videos.create(**ORDER)
        assert (created.status, created.progress, created.prompt) == ("queued", 0, "a red fox")
        assert (created.size, created.seconds, created.model) == (f"{SIDE}x{SIDE}", "1", "tiny")
        first = await polled(client, created.id)
        assert (first.status, first.progress, first.error) == ("completed", 100, None)
        assert first.completed_at is not None
        assert first.expires_at is not None
        file = (await client.videos.download_content(first.id)).read()
        assert shown(file) == ("h264", SIDE, SIDE, 9, FPS)
        again = await client.videos.create_and_poll(**ORDER, poll_interval_ms=100)
        assert again.status == "completed"
        assert (await client.videos.download_content(again.id)).read() == file
        body = {key: value for key, value in ORDER.items() if key != "extra_body"}
        async with up.client() as http:
            # As JSON, too.
            made = await http.post("/v1/videos", json=body | {"seed": 12, "steps": 3, "seconds": 0.6})
            assert made.status_code == 200, made.text
        other = await polled(client, made.json()["id"])
        data = (await client.videos.download_content(other.id)).read()
        assert shown(data) == ("h264", SIDE, SIDE, 5, FPS)
        assert [video.id async for video in client.videos.list(limit=2)] == [other.id, again.id, first.id]
        await client.videos.delete(again.id)
        with pytest.raises(openai.NotFoundError, match="no such video"):
            await client.videos.retrieve(again.id)
        with pytest.raises(openai.BadRequestError, match="input_reference"):
            await client.videos.create(**ORDER, input_reference=b"an image")
        with pytest.raises(openai.BadRequestError, match="multiples of 16"):
            await client.videos.create(**ORDER | {"size": "65x64"})
        with pytest.raises(openai.BadRequestError, match="at most 2"):
            await client.videos.create(**ORDER | {"seconds": "8"})
        with pytest.raises(openai.BadRequestError, match="does not generate images; use /v1/videos"):
            await client.images.generate(model="tiny", prompt="x")
        endless = await client.videos.create(**ORDER | {"extra_body": {"steps": 1000}})
        await up.until("the worker generates", lambda stats: any(one.get("running") for one in stats))
        await client.videos.delete(endless.id)
        await up.until("the worker is idle", lambda stats: not any(one.get("running") for one in stats))


@pytest.mark.soak
async def test_kill_9_of_the_worker_and_of_the_edge(tmp_path: Path, pipeline: Path) -> None:
    """Another worker begins with the same noise; the edge's next incarnation goes on where the first was."""
    order = ORDER | {"extra_body": {"seed": 11, "steps": 300}}
    async with workers(2, tmp_path, pipeline) as up, up.official_client() as client:
        undisturbed = await client.videos.create_and_poll(**order, poll_interval_ms=100)
        file = (await client.videos.download_content(undisturbed.id)).read()
        for victim in ("worker", "edge"):
            made = await client.videos.create(**order)
            stats = await up.until(
                "a worker generates", lambda stats: any(one.get("running") for one in stats)
            )
            if victim == "worker":
                await up.kill_worker(next(one["id"] for one in stats if one.get("running")))
            else:
                await asyncio.sleep(2.0)
                up.kill("headwater edge")
            while True:
                try:
                    video = await polled(client, made.id)
                    break
                except openai.APIConnectionError:
                    await asyncio.sleep(0.2)
            assert video.status == "completed", video
            assert (await client.videos.download_content(video.id)).read() == file
