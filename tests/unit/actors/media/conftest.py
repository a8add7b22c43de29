"""A small Internet, and intakes with several policies that see it. Their processes serve all tests of a run."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headwater.actors.http.errors import ApiError
from headwater.actors.media.intake import DEFAULT_TARGET, START_S, WALL_PER_CPU, MediaIntake
from headwater.actors.media.request import FetchPolicy, IntakeSettings, MediaLimits, MediaSource, MediaTarget
from tests.support.media.bounds import bounded
from tests.support.media.internet import Internet, internet

HOST = "images.example"
OTHER_HOST = "other.example"

TIGHT = MediaLimits()
FETCH_S = 4.0
"""Long enough for a handshake on a busy machine: an attack is to be rejected for what it is, not because it took too long."""

TIGHT = TIGHT._replace(
    image=TIGHT.image._replace(bytes_max=200_000, pixels_max=1_000_000, fetch_s=FETCH_S, decode_s=1),
    audio=TIGHT.audio._replace(bytes_max=400_000, fetch_s=FETCH_S, seconds_max=2.0, channels_max=2),
    video=TIGHT.video._replace(
        bytes_max=400_000, fetch_s=FETCH_S, seconds_max=2.0, file_frames_max=200, pixels_max=10_000
    ),
    embedding=TIGHT.embedding._replace(bytes_max=200_000, tokens_max=16),
    file=TIGHT.file._replace(
        bytes_max=200_000, fetch_s=FETCH_S, decode_s=1, pages_max=8, text_bytes_max=50_000
    ),
)
"""Small enough that an attack is a small file, and a slow server a short test."""

REJECTED_S_MAX = START_S + FETCH_S + WALL_PER_CPU * 1
"""The intake's own bound, with the second that an attack may take to decode; on a quiet machine it takes a second or two."""

PEAK_KIB_MAX = 112 * 1024
"""Python with the libraries has 40 to 70 MiB; what an attack would take, had it its way, is 25 MB to gigabytes."""


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    """Two hosts with certificates. Paths and names of one test have that test's own names."""
    with internet(tmp_path_factory.mktemp("internet"), HOST, OTHER_HOST) as made:
        yield made


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wide policy lists."""
    return tmp_path_factory.mktemp("listed").resolve()


@pytest.fixture(scope="session")
def strict(net: Internet) -> Iterator[MediaIntake]:
    """The default policy."""
    yield from _intake(MediaIntake(limits=TIGHT, program=net.program))


@pytest.fixture(scope="session")
def wide(net: Internet, files: Path) -> Iterator[MediaIntake]:
    """Http and files too, from some hosts and one more port only."""
    policy = FetchPolicy(
        schemes=("https", "data", "http", "file"),
        hosts=(HOST, "*.cdn.example", "127.0.0.1"),
        ports=(8080,),
        directories=(str(files),),
    )
    yield from _intake(MediaIntake(policy, IntakeSettings(processes=1), TIGHT, program=net.program))


def _intake(made: MediaIntake) -> Iterator[MediaIntake]:
    yield made
    asyncio.run(made.close())


@asynccontextmanager
async def closing(made: MediaIntake) -> AsyncIterator[MediaIntake]:
    """An intake, whose processes end with the block."""
    try:
        yield made
    finally:
        await made.close()


async def rejection(
    intake: MediaIntake,
    source: MediaSource,
    limits: MediaLimits | None = None,
    target: MediaTarget = DEFAULT_TARGET,
    *,
    kib_max: int = PEAK_KIB_MAX,
) -> ApiError:
    """The error for an item, in bounded time and memory. It names the item's place in the request."""
    async with bounded(intake, REJECTED_S_MAX, kib_max):
        with pytest.raises(ApiError) as caught:
            await intake.fetch(source._replace(param="messages[0].content[1]"), limits, target)
    assert caught.value.status == 400
    assert caught.value.param == "messages[0].content[1]"
    assert str(caught.value).endswith((".", ")"))
    return caught.value
