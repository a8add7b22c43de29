"""A process that decodes what strangers send may be taken over by it: what it replies is checked, and it is ended."""

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from headwater.actors.http.errors import ApiError
from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.request import IntakeSettings, MediaSource
from tests.support.media import internet
from tests.support.media.bounds import bounded
from tests.support.media.images import encoded, noise
from tests.unit.actors.media.conftest import PEAK_KIB_MAX, TIGHT, closing, rejection

ROGUE = str(Path(internet.__file__).with_name("rogue.py"))
IMAGE = MediaSource.from_bytes("image", b"anything")


def intake_of(mode: str) -> MediaIntake:
    """An intake whose process replies in this way."""
    return MediaIntake(settings=IntakeSettings(processes=1), program=(ROGUE, mode))


def descriptors() -> set[tuple[str, str]]:
    """The open descriptors of this process and what they are. Memory of other tests' items may end at any time."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return {one for one in found if not one[1].startswith("/proc/")}


@pytest.mark.parametrize(
    "mode",
    [
        "unsealed",
        "may shrink",
        "smaller than stated",
        "larger than stated",
        "no memory",
        "a file of its own",
        "another task",
        "unknown type",
        "negative shape",
        "memory with a rejection",
        "garbage",
        "closes",
    ],
)
async def test_a_reply_that_breaks_the_protocol_fails_the_item_and_ends_the_process(mode: str) -> None:
    """Memory that could still change or shrink would end this process when it reads it; nothing stays open."""
    before = descriptors()
    async with closing(intake_of(mode)) as intake:
        error = await rejection(intake, IMAGE)
        assert error.code == "media_decoder_failed"
        assert not intake.pids
        assert not descriptors() - before


async def test_an_honest_reply_passes() -> None:
    """The control of the test above."""
    async with closing(intake_of("honest")) as intake:
        assert (await intake.fetch(IMAGE)).array().tolist() == [[[0, 0, 0]]]


async def test_what_an_item_costs_is_seen(strict: MediaIntake) -> None:
    """The control of the attacks' bounds: an image that takes more memory, or time, than is allowed fails them."""
    image = MediaSource.from_bytes("image", encoded(noise(900), "PNG"))
    limits = TIGHT._replace(image=TIGHT.image._replace(bytes_max=9_000_000))
    async with bounded(strict, 20.0, PEAK_KIB_MAX) as peak:
        await strict.fetch(image, limits)
    with pytest.raises(AssertionError, match="KiB; at most"):
        async with bounded(strict, 20.0, peak.kib // 2):
            await strict.fetch(image, limits)
    with pytest.raises(TimeoutError):
        async with bounded(strict, 0.001, PEAK_KIB_MAX):
            await strict.fetch(image, limits)


async def test_without_the_extra_an_item_gets_a_503(tmp_path: Path) -> None:
    """With the package to install, and without a retry."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nsys.modules['PIL'] = None\nfrom headwater.actors.media import program\nprogram.main()\n"
    )
    async with closing(MediaIntake(program=(str(program),))) as intake:
        with pytest.raises(ApiError) as caught:
            await intake.fetch(MediaSource.from_bytes("image", b"\x89PNG\r\n\x1a\n" + bytes(50)))
        assert (caught.value.status, caught.value.code) == (503, "media_unavailable")
        assert "headwater[media]" in str(caught.value)
        assert (b"x-should-retry", b"false") in caught.value.headers


EDGE = """
import asyncio, os
from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.request import MediaSource

async def main():
    intake = MediaIntake()
    try:
        await intake.fetch(MediaSource.from_bytes("image", b"no image"))
    except Exception:
        print(*intake.pids, flush=True)
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_a_process_ends_with_the_edge_that_started_it() -> None:
    """Also if the edge is killed, and can end nothing."""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", EDGE], stdout=subprocess.PIPE, timeout=60, check=False
    )
    assert done.returncode == -9
    (pid,) = map(int, done.stdout.split())
    async with asyncio.timeout(60):
        while is_running(pid):
            await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than one that ended and that nothing has waited for."""
    with suppress(FileNotFoundError, ProcessLookupError):
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    return False
