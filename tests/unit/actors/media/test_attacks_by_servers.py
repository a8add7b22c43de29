"""Servers that send too much, too slowly, or not what they announce: each item is rejected in bounded time."""

import asyncio
import gzip
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from headwater.actors.http.errors import ApiError
from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.request import IntakeSettings, MediaSource
from tests.support.media.images import data_url, encoded, picture
from tests.support.media.internet import Internet
from tests.unit.actors.media.conftest import HOST, TIGHT, closing, rejection

PNG = encoded(picture(), "PNG")
OK = b"HTTP/1.1 200 OK\r\n"
MEGABYTE = bytes(1 << 20)


def drip(first: bytes, piece: bytes, pause_s: float = 0.05) -> Callable[[socket.socket], None]:
    """Send `piece` again and again until the client leaves."""

    def behave(to: socket.socket) -> None:
        to.sendall(first)
        while True:
            to.sendall(piece)
            time.sleep(pause_s)

    return behave


def silent(to: socket.socket) -> None:
    """Say nothing until the client leaves."""
    to.recv(1)


SLOW = {
    "body": drip(OK + b"Content-Length: 1000\r\n\r\n" + PNG[:8], b"\0"),
    "header": drip(OK, b"X-More: 1\r\n", 0.2),
    "header line": drip(OK + b"X-Long: ", b"a"),
    "interim responses": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "chunks": drip(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n\0\r\n"),
    "silence": silent,
}

BODIES: dict[str, tuple[bytes, str]] = {
    "shorter than announced": (OK + b"Content-Length: 5000\r\n\r\n" + PNG, "media_length_mismatch"),
    "announced too large": (OK + b"Content-Length: 900000\r\n\r\n" + PNG, "media_too_large"),
    "too large without a length": (OK + b"\r\n" + PNG + MEGABYTE, "media_too_large"),
    "too large in chunks": (
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"100000\r\n" + MEGABYTE + b"\r\n0\r\n\r\n",
        "media_too_large",
    ),
    "two lengths": (OK + b"Content-Length: 5\r\nContent-Length: 9\r\n\r\n" + PNG, "media_bad_response"),
    "length and chunks": (
        OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "media_bad_response",
    ),
    "negative length": (OK + b"Content-Length: -1\r\n\r\n" + PNG, "media_bad_response"),
    "length in words": (OK + b"Content-Length: many\r\n\r\n" + PNG, "media_bad_response"),
    "cut chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\nffff\r\nabc", "media_bad_response"),
    "chunk without a size": (OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "media_bad_response"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "media_bad_response"),
    "nothing": (b"", "media_bad_response"),
    "too many headers": (OK + b"A: b\r\n" * 200 + b"\r\n", "media_bad_response"),
    "a header without end": (OK + b"A: " + b"b" * 100_000, "media_bad_response"),
    "compressed": (
        OK + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n" + gzip.compress(PNG),
        "media_content_encoding",
    ),
    "empty": (OK + b"Content-Length: 0\r\n\r\n", "media_empty"),
    "error page": (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", "media_fetch_failed"),
    "part": (b"HTTP/1.1 206 Partial Content\r\nContent-Length: 1\r\n\r\na", "media_fetch_failed"),
}


@pytest.mark.parametrize("attack", SLOW)
async def test_a_slow_server_is_left_when_the_time_is_over(
    strict: MediaIntake, net: Internet, attack: str
) -> None:
    """However much it keeps sending: the limit is on the whole, not on each silence."""
    net.behaviours["/slow"] = SLOW[attack]
    began = time.monotonic()
    limits = TIGHT._replace(image=TIGHT.image._replace(fetch_s=0.3))
    error = await rejection(strict, MediaSource.from_url("image", f"https://{HOST}/slow"), limits)
    assert error.code == "media_fetch_timeout"
    assert time.monotonic() - began >= 0.3


async def test_a_resolver_that_does_not_answer_is_left_too(strict: MediaIntake, net: Internet) -> None:
    """Though nothing interrupts it, and the process serves the next item."""
    net.name("stuck.example", ["93.184.216.34"])
    limits = TIGHT._replace(image=TIGHT.image._replace(fetch_s=0.3))
    error = await rejection(strict, MediaSource.from_url("image", "https://stuck.example/"), limits)
    assert error.code == "media_fetch_timeout"
    pids = set(strict.pids)
    assert (await strict.fetch(MediaSource.from_bytes("image", PNG))).shape == (4, 6, 3)
    assert strict.pids == pids


@pytest.mark.parametrize("attack", BODIES)
async def test_a_body_is_what_was_announced_and_within_limits(
    strict: MediaIntake, net: Internet, attack: str
) -> None:
    """What counts is what arrives."""
    data, code = BODIES[attack]
    net.raw("/body", data)
    error = await rejection(strict, MediaSource.from_url("image", f"https://{HOST}/body"))
    assert error.code == code


async def test_a_certificate_must_be_the_hosts(strict: MediaIntake, net: Internet) -> None:
    """The address being right is no proof."""
    net.name("other-name.example", ["93.184.216.34"])
    error = await rejection(strict, MediaSource.from_url("image", "https://other-name.example/"))
    assert error.code == "media_fetch_failed"
    assert "certificate" in str(error).lower()


async def test_a_request_says_nothing_about_the_edge(strict: MediaIntake, net: Internet) -> None:
    """The URL's path and host, and headers that are the same for everybody."""
    net.serve("/plain.png", PNG)
    await strict.fetch(MediaSource.from_url("image", f"https://{HOST}/plain.png?a=ü#part"))
    assert net.requests[-1].split("\r\n") == [
        "GET /plain.png?a=%C3%BC HTTP/1.1",
        f"Host: {HOST}",
        "User-Agent: headwater-media",
        "Accept: */*",
        "Accept-Encoding: identity",
        "Connection: close",
        "",
        "",
    ]


async def test_slow_servers_leave_a_process_for_media_in_requests(net: Internet) -> None:
    """With two processes one may wait for the network; with a queue of one, a third URL gets a 503."""
    net.behaviours["/slow"] = silent
    intake = MediaIntake(settings=IntakeSettings(processes=2, queue_max=1), limits=TIGHT, program=net.program)
    slow = MediaSource.from_url("image", f"https://{HOST}/slow")
    fetching = [asyncio.ensure_future(intake.fetch(slow)) for _ in range(2)]
    try:
        async with asyncio.timeout(20):
            while not net.requests or "/slow" not in net.requests[-1]:
                await asyncio.sleep(0.01)
            assert (await intake.fetch(MediaSource.from_url("image", data_url(PNG)))).shape == (4, 6, 3)
            with pytest.raises(ApiError) as caught:
                await intake.fetch(slow)
            assert (caught.value.status, caught.value.code) == (503, "media_busy")
            assert caught.value.retry_after_s
    finally:
        for one in fetching:
            one.cancel()
        await asyncio.gather(*fetching, return_exceptions=True)
        await intake.close()


async def test_a_crash_fails_its_item_alone(net: Internet) -> None:
    """The other process continues; the next item gets a new one; the place of the dead one is not lost."""
    net.requests.clear()
    net.behaviours["/crash"] = silent
    small = MediaSource.from_url("image", data_url(PNG))
    async with closing(
        MediaIntake(settings=IntakeSettings(processes=2), limits=TIGHT, program=net.program)
    ) as intake:
        async with asyncio.timeout(30):
            dying = asyncio.ensure_future(
                intake.fetch(MediaSource.from_url("image", f"https://{HOST}/crash"))
            )
            while not net.requests:
                await asyncio.sleep(0.01)
            assert (await intake.fetch(small)).shape == (4, 6, 3)
            (victim,) = intake.pids - {process.pid for process in intake.idle}
            os.kill(victim, signal.SIGSEGV)
            with pytest.raises(ApiError) as caught:
                await dying
            assert (caught.value.status, caught.value.code) == (400, "media_decoder_failed")
            for _ in range(3):
                assert (await intake.fetch(small)).shape == (4, 6, 3)
            await asyncio.gather(intake.fetch(small), intake.fetch(small))
            assert victim not in intake.pids


async def test_a_cancelled_item_ends_its_process_and_frees_its_place(net: Internet) -> None:
    """Clients that disconnect leave nothing behind."""
    net.requests.clear()
    net.behaviours["/left"] = silent
    async with closing(
        MediaIntake(settings=IntakeSettings(processes=1), limits=TIGHT, program=net.program)
    ) as intake:
        async with asyncio.timeout(30):
            left = asyncio.ensure_future(intake.fetch(MediaSource.from_url("image", f"https://{HOST}/left")))
            while not net.requests:
                await asyncio.sleep(0.01)
            (pid,) = intake.pids
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            assert not os.path.exists(f"/proc/{pid}")
            assert (await intake.fetch(MediaSource.from_url("image", data_url(PNG)))).shape == (4, 6, 3)
    assert not intake.pids


def _descriptors(pid: int) -> list[str]:
    """What the open descriptors of a process are."""
    found = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{descriptor}").partition(":")[0])
    return sorted(found)


async def test_a_process_has_nothing_of_its_parents(net: Internet, monkeypatch: pytest.MonkeyPatch) -> None:
    """No secrets in its environment, no descriptors but three empty ones and its socket; limits on memory."""
    monkeypatch.setenv("SECRET_KEY", "abc")
    async with closing(
        MediaIntake(settings=IntakeSettings(memory_mib=512), limits=TIGHT, program=net.program)
    ) as intake:
        with open(__file__) as _file:
            await intake.fetch(MediaSource.from_url("image", data_url(PNG)))
        (pid,) = intake.pids
        with open(f"/proc/{pid}/environ") as file:
            names = {pair.partition("=")[0] for pair in file.read().split("\0") if pair}
        assert names <= {"PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "LANG"} | {
            "OPENBLAS_NUM_THREADS",
            "OMP_NUM_THREADS",
        }
        # It answers before it closes the item's memory.
        async with asyncio.timeout(10):
            while _descriptors(pid) != ["/dev/null"] * 3 + ["socket"]:
                await asyncio.sleep(0.01)
        with open(f"/proc/{pid}/limits") as file:
            limits = {line[:25].strip(): line[26:47].strip() for line in file}
        assert limits["Max address space"] == str(512 << 20)
        assert limits["Max core file size"] == "0"
