"""Images by the official client from `headwater up` with a real pipeline of diffusers on CPUs, and `kill -9` in the middle."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from PIL import Image

from tests.support.engines.diffusion import tiny_image_pipeline
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [
    pytest.mark.processes,
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

SIDE = tiny_image_pipeline.SIDE
STEPS_MAX = 999
"""The model was trained with 1,000, and its scheduler leaves the first one out."""

ORDER: dict[str, Any] = {"model": "tiny", "prompt": "a red fox", "extra_body": {"seed": 11, "steps": 3}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    return await asyncio.to_thread(tiny_image_pipeline.make, tmp_path_factory.mktemp("model") / "tiny")


@asynccontextmanager
async def workers(count: int, folder: Path, pipeline: Path) -> AsyncIterator[FleetProcess]:
    """A fleet with so many workers."""
    options = ("--engine-options", '{"device": "cpu", "threads": 1, "steps_max": 1000000}')
    flags = ("--engine", "diffusers", "--model", str(pipeline), "--workers", str(count), *options)
    async with fleet(folder, *flags, ready_s=240, vllm=True) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory, pipeline: Path) -> AsyncIterator[FleetProcess]:
    """One worker."""
    async with workers(1, tmp_path_factory.mktemp("diffusers"), pipeline) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(up: FleetProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client."""
    async with up.official_client() as made:
        yield made


def opened(data: str | bytes | None) -> Image.Image:
    """A file, or one in base64."""
    assert data is not None
    image = Image.open(io.BytesIO(base64.b64decode(data) if isinstance(data, str) else data))
    image.load()
    return image


def one_runs(stats: list[dict[str, Any]]) -> bool:
    """Does a worker generate?"""
    return any(one.get("running") for one in stats)


def epochs_of(stats: list[dict[str, Any]]) -> dict[str, int]:
    """The epoch of each worker."""
    return {one["id"]: one["epoch"] for one in stats if "running" in one}


async def test_images_are_the_pipelines_own_and_the_same_for_the_same_seed(
    up: FleetProcess, client: openai.AsyncOpenAI
) -> None:
    """In the size and format asked for, inline or at a URL; another seed and another prompt are other images."""
    first = await client.images.generate(**ORDER, n=2)
    assert first.data is not None
    [one, two] = [entry.b64_json for entry in first.data]
    assert opened(one).size == (SIDE, SIDE)
    assert opened(one).format == "PNG"
    assert one != two
    again = await client.images.generate(**ORDER)
    assert again.data is not None
    assert again.data[0].b64_json == one
    following = await client.images.generate(**ORDER | {"extra_body": {"seed": 12, "steps": 3}})
    assert following.data is not None
    assert following.data[0].b64_json == two
    other = await client.images.generate(**ORDER | {"prompt": "a blue owl"})
    assert other.data is not None
    assert other.data[0].b64_json != one
    wide = await client.images.generate(
        **ORDER, size="auto", output_format="webp", output_compression=80, response_format="url"
    )
    assert wide.data is not None
    url = wide.data[0].url
    assert url is not None
    assert url.startswith(f"{up.url}/v1/images/files/img_")
    async with up.client() as http:
        got = await http.get(url)
        assert (got.status_code, got.headers["content-type"]) == (200, "image/webp")
        assert opened(got.content).format == "WEBP"
        assert (await http.get(f"{up.url}/v1/images/files/img_{32 * '0'}.webp")).status_code == 404
    with pytest.raises(openai.BadRequestError, match="multiples of 4"):
        await client.images.generate(model="tiny", prompt="x", size="65x64")
    with pytest.raises(openai.BadRequestError, match=f"at most {STEPS_MAX} per image"):
        await client.images.generate(model="tiny", prompt="x", extra_body={"steps": 1001})
    with pytest.raises(openai.BadRequestError, match="does not generate text"):
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])


async def test_a_stream_shows_the_image_as_it_becomes_clear(client: openai.AsyncOpenAI) -> None:
    """Previews are images too, and the last event is the one that a plain request gets."""
    plain = await client.images.generate(**ORDER)
    assert plain.data is not None
    shown = []
    async for event in await client.images.generate(**ORDER, stream=True, partial_images=2):
        shown.append(event)
    assert [event.type for event in shown] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    assert {opened(event.b64_json).size for event in shown} == {(SIDE, SIDE)}
    assert len({event.b64_json for event in shown}) == len(shown)
    assert shown[-1].b64_json == plain.data[0].b64_json


def picture(mode: str, colours: tuple[int, ...], side: int = 96) -> tuple[str, bytes]:
    """A PNG of `side` × 64 pixels, whose halves have these colours."""
    half = len(colours) // 2
    image = Image.new(mode, (side, 64), colours[:half])
    image.paste(colours[half:], (side // 2, 0, side, 64))
    written = io.BytesIO()
    image.save(written, "PNG")
    return "a.png", written.getvalue()


async def test_images_are_changed(client: openai.AsyncOpenAI) -> None:
    """From an upload and a prompt, of the upload's shape; with a mask only a part of it. What is no image, or too many, is refused by name."""
    source = picture("RGB", (200, 30, 40, 20, 60, 210))

    async def edited(**changes: Any) -> list[str | None]:
        answer = await client.images.edit(**{**ORDER, "image": source, **changes})
        assert answer.data is not None
        return [entry.b64_json for entry in answer.data]

    [one] = await edited()
    assert opened(one).size == (80, 64)
    assert (await edited(image=[source], n=2))[0] == one
    for changes in (
        {"prompt": "a blue owl"},
        {"image": picture("RGB", (0, 0, 0, 9, 9, 9))},
        {"size": "64x64"},
    ):
        assert await edited(**changes) != [one]
    mask = picture("RGBA", (0, 0, 0, 0, 0, 0, 0, 255))
    [masked] = await edited(mask=mask)
    kept, before = (
        image.resize((80, 64)).getpixel((79, 30)) for image in (opened(masked), opened(source[1]))
    )
    assert kept == before
    assert opened(masked).getpixel((5, 30)) != (200, 30, 40)
    shown = []
    async for event in await client.images.edit(**ORDER, image=source, stream=True, partial_images=1):
        shown.append(event)
    assert [event.type for event in shown] == ["image_edit.partial_image", "image_edit.completed"]
    assert shown[-1].b64_json == one
    for wrong, says in (
        (
            {"image": ("a.png", b"no image at all, whatever its name says")},
            "no known type by its first bytes",
        ),
        ({"image": [source, source]}, "tiny takes 1"),
        ({"mask": source}, "no transparency"),
        ({"mask": picture("RGBA", (0,) * 8, side=64)}, "must be of the same size"),
        ({"extra_body": {"strength": 0.01}}, "less than one step"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            await edited(**wrong)
    with pytest.raises(openai.NotFoundError, match="/v1/images/edits"):
        await client.images.create_variation(model="tiny", image=source)


async def test_a_worker_whose_client_left_is_idle_at_once(
    up: FleetProcess, client: openai.AsyncOpenAI
) -> None:
    """The pipeline stops in the middle of an image that would take long."""
    order = ORDER | {"extra_body": {"seed": 11, "steps": STEPS_MAX}}
    endless = asyncio.ensure_future(client.images.generate(**order, n=10))

    def runs(stats: list[dict[str, Any]]) -> bool:
        if endless.done():
            raise AssertionError(f"it ended at once: {endless.exception() or endless.result()}")
        return one_runs(stats)

    await up.until("the worker generates", runs)
    endless.cancel()
    await asyncio.gather(endless, return_exceptions=True)
    await up.until("the worker is idle", lambda stats: not one_runs(stats))


@pytest.mark.soak
async def test_kill_9_in_the_middle_of_an_image(tmp_path: Path, pipeline: Path) -> None:
    """The other worker gives the image that the first would have; the client has it once."""
    steps = {"seed": 11, "steps": 300}
    seen: list[Any] = []
    async with workers(2, tmp_path, pipeline) as up, up.official_client() as client:
        undisturbed = await client.images.generate(**ORDER | {"extra_body": steps})
        order = ORDER | {"extra_body": steps | {"progress": True}}
        async for event in await client.images.generate(**order, stream=True):
            if not seen:
                stats = await up.until("a worker generates", one_runs)
                epochs = epochs_of(stats)
                await up.kill_worker(next(one["id"] for one in stats if one.get("running")))
            seen.append(event)
        assert undisturbed.data is not None
        assert [event.type for event in seen].count("image_generation.completed") == 1
        assert seen[-1].b64_json == undisturbed.data[0].b64_json
        after = await up.until("both workers", lambda stats: len(epochs_of(stats)) == 2)
        assert epochs_of(after) != epochs, "nothing was killed: the test shows nothing"
