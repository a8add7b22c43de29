"""Media through a running edge, as clients send them: fetched from a server, and attacks that are each rejected by name and in time."""

import asyncio
import base64
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple, cast

import httpx
import pytest
import pytest_asyncio

from headwater.actors.media.intake import START_S, WALL_PER_CPU
from tests.support.clients.pictures import picture_file
from tests.support.clients.sim_images import expected, question
from tests.support.media.documents import pdf
from tests.support.media.images import data_url, encoded, jpeg_of_size, picture, png, scan_bomb
from tests.support.media.internet import Internet, internet
from tests.support.media.recordings import film, tone, wav
from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

FETCH_S = 4.0
"""Long enough for a handshake on a busy machine: an attack is to be rejected for what it is, not because it took too long."""

REJECTED_S_MAX = START_S + FETCH_S + WALL_PER_CPU * 1 + 5.0
"""The intake's own bound, with a second to decode, and the request."""

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PNG = encoded(picture(), "PNG")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    """A plain and a TLS server on loopback; nothing on this machine trusts the certificate of the latter."""
    with internet(tmp_path_factory.mktemp("internet"), "localhost") as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(net: Internet, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """An edge that may fetch from loopback, and from these two ports there."""
    ports = ",".join((net.folder / name).read_text() for name in ("plain", "tls"))
    web = ("--media-schemes", "https,data,http", "--media-networks", "127.0.0.0/8", "--media-ports", ports)
    limits = ("--media-limits", f"image_fetch_s={FETCH_S:g},image_decode_s=1,file_pages_max=8")
    flags = ("--engine", "sim", "--workers", "1", "--sim-step-time", "zero")
    async with fleet(tmp_path_factory.mktemp("media"), *flags, *web, *limits) as made:
        yield made


def origin(net: Internet, scheme: str = "http") -> str:
    """Of a server."""
    return f"{scheme}://127.0.0.1:{(net.folder / ('plain' if scheme == 'http' else 'tls')).read_text()}"


async def test_an_edge_fetches_what_a_url_names(up: FleetProcess, net: Internet) -> None:
    """By each API, and after a redirect: the answer is that of the picture sent along."""
    net.serve("/picture.png", picture_file(1))
    net.redirect("/moved.png", "/picture.png")
    url = f"{origin(net)}/picture.png"
    asked = question(1, before="what is it?")
    async with up.client() as client:
        for link in (url, f"{origin(net)}/moved.png"):
            asked["messages"][0]["content"][1] = {"type": "image_url", "image_url": {"url": link}}
            reply = await client.post(CHAT, json=asked)
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["message"]["content"] == expected(1)
        before = len(net.requests)
        for path, body in (
            (RESPONSES, responses({"type": "input_image", "image_url": url})),
            (MESSAGES, messages({"type": "image", "source": {"type": "url", "url": url}})),
        ):
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
        assert len(net.requests) == before + 2


async def test_the_official_clients_name_images_by_url(up: FleetProcess, net: Internet) -> None:
    """As their documentation shows."""
    import anthropic

    net.serve("/picture.png", picture_file(1))
    url = f"{origin(net)}/picture.png"
    before = len(net.requests)
    async with up.official_client() as client:
        chat_answer = await client.chat.completions.create(
            **cast(Any, chat({"type": "image_url", "image_url": {"url": url}}))
        )
        response = await client.responses.create(
            **cast(Any, responses({"type": "input_image", "image_url": url, "detail": "auto"}))
        )
    async with anthropic.AsyncAnthropic(base_url=up.url, api_key="none", max_retries=0) as other:
        source = {"type": "image", "source": {"type": "url", "url": url}}
        message = await other.messages.create(**cast(Any, messages(source)))
    assert chat_answer.usage is not None
    assert response.usage is not None
    counts = (
        chat_answer.usage.prompt_tokens,
        response.usage.input_tokens,
        message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0),
    )
    assert min(counts) == max(counts) > 1
    assert len(net.requests) == before + 3


async def test_base64_may_have_line_breaks(up: FleetProcess) -> None:
    """As other tools write it: by each API."""
    data = base64.encodebytes(picture_file(2)).decode()
    url = f"data:image/png;base64,{data}"
    source = {"type": "base64", "media_type": "image/png", "data": data}
    async with up.client() as client:
        for path, body in (
            (CHAT, chat({"type": "image_url", "image_url": {"url": url}})),
            (RESPONSES, responses({"type": "input_image", "image_url": url})),
            (MESSAGES, messages({"type": "image", "source": source})),
        ):
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text


def chat(*parts: Any) -> dict[str, Any]:
    """A request for one token about these parts."""
    return {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": list(parts)}]}


def responses(*parts: Any) -> dict[str, Any]:
    """The same of the Responses API."""
    return {"model": "sim", "max_output_tokens": 1, "input": [{"role": "user", "content": list(parts)}]}


def messages(*blocks: Any) -> dict[str, Any]:
    """The same of Anthropic's."""
    return {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": list(blocks)}]}


def text64(data: bytes) -> str:
    """Base64."""
    return base64.b64encode(data).decode()


class Attack(NamedTuple):
    """A request, and the code of its error, or words of it where the API has no codes."""

    path: str
    body: dict[str, Any]
    code: str


def image(url: str, code: str) -> Attack:
    """An image in a chat."""
    return Attack(CHAT, chat({"type": "image_url", "image_url": {"url": url}}), code)


def served(path: str, code: str) -> Callable[[Internet], Attack]:
    """An image at a path of the server."""
    return lambda net: image(origin(net) + path, code)


def sent(data: bytes, code: str) -> Callable[[Internet], Attack]:
    """An image in a data URL."""
    return lambda _: image(data_url(data), code)


def audio(data: bytes, code: str) -> Callable[[Internet], Attack]:
    """Audio in a chat."""
    part = {"type": "input_audio", "input_audio": {"data": text64(data), "format": "wav"}}
    return lambda _: Attack(CHAT, chat(part), code)


def file(data: bytes, code: str) -> Callable[[Internet], Attack]:
    """A file in the Responses API."""
    part = {"type": "input_file", "filename": "a.pdf", "file_data": data_url(data, "application/pdf")}
    return lambda _: Attack(RESPONSES, responses(part), code)


def block(data: str, words: str) -> Callable[[Internet], Attack]:
    """An image in Anthropic's API."""
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return lambda _: Attack(MESSAGES, messages({"type": "image", "source": source}), words)


ENCRYPTION = "/Encrypt << /Filter /Standard /V 1 /R 2 /O (o) /U (u) /P -4 >> /ID [(a) (a)]"

ATTACKS: dict[str, Callable[[Internet], Attack]] = {
    "metadata service": lambda _: image("https://169.254.169.254/latest/", "media_private_address"),
    "private network": lambda _: image("http://10.0.0.1/", "media_private_address"),
    "decimal address": lambda _: image("https://2130706433/", "media_bad_host"),
    "user name before the host": lambda _: image("https://a@127.0.0.1/", "media_bad_url"),
    "file": lambda _: image("file:///etc/passwd", "media_scheme_not_allowed"),
    "port of another service": lambda _: image("http://127.0.0.1:4222/", "media_port_not_allowed"),
    "redirect to the metadata service": served("/inside", "media_private_address"),
    "redirect to a file": served("/file", "media_scheme_not_allowed"),
    "redirects without end": served("/round", "media_too_many_redirects"),
    "certificate of nobody": lambda net: image(f"{origin(net, 'https')}/", "media_fetch_failed"),
    "slow server": served("/slow", "media_fetch_timeout"),
    "server that announces a gigabyte": served("/large", "media_too_large"),
    "PNG that claims 4 gigapixels": sent(png(65_535, 65_535), "media_too_many_pixels"),
    "JPEG that claims 4 gigapixels": sent(jpeg_of_size(65_535, 65_535), "media_too_many_pixels"),
    "JPEG that is hours of work": sent(scan_bomb(), "media_decode_timeout"),
    "cut PNG": sent(PNG[:-30], "media_malformed"),
    "SVG that names a file": sent(b'<svg><image href="file:///etc/passwd"/></svg>', "media_unknown_type"),
    "program": sent(b"\x7fELF" + bytes(60), "media_unknown_type"),
    "nothing": sent(b"", "media_empty"),
    "image as sound": audio(PNG, "media_wrong_type"),
    "sound of an hour at one sample a second": audio(wav(tone(3600.0, 1), 1), "media_too_long"),
    "cut video": lambda _: Attack(
        CHAT,
        chat({"type": "video_url", "video_url": {"url": data_url(film(5, "webm", "libvpx")[:60], "video/webm")}}),
        "media_malformed",
    ),
    "PDF with a password": file(pdf(["x"], trailer=ENCRYPTION), "media_encrypted"),
    "PDF with too many pages": file(pdf(["x"] * 9), "media_too_many_pages"),
    "pickled tensor": lambda _: Attack(
        CHAT,
        chat({"type": "image_embeds", "image_embeds": text64(b"\x80\x04cos\nsystem\n(S'id'\ntR.")}),
        "media_embeddings_not_allowed",
    ),
    "Anthropic, characters of no alphabet": block("iVB*RK5C", "base64 of the media is invalid"),
    "Anthropic, a page": block(text64(b"<!doctype html><script>alert(1)</script>" + PNG), "first bytes"),
}  # fmt: skip


def drip(to: socket.socket) -> None:
    """A body without end, slowly."""
    to.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        to.sendall(b"a")
        time.sleep(0.05)


@pytest.fixture(scope="module")
def hostile(net: Internet) -> Internet:
    """What the attacks' paths lead to."""
    net.redirect("/inside", "http://169.254.169.254/")
    net.redirect("/file", "file:///etc/passwd")
    net.redirect("/round", "/round")
    net.behaviours["/slow"] = drip
    net.serve("/large", b"a", length=1 << 30)
    return net


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_is_rejected_by_name(up: FleetProcess, hostile: Internet, attack: str) -> None:
    """With the place of the item in the request, in bounded time; the edge serves the next one."""
    path, body, code = ATTACKS[attack](hostile)
    async with up.client() as client, asyncio.timeout(REJECTED_S_MAX):
        reply = await client.post(path, json=body)
        assert 400 <= reply.status_code < 500, reply.text
        error = reply.json()["error"]
        if path == MESSAGES:
            assert error["type"] == "invalid_request_error"
            assert code in error["message"]
        else:
            assert error["code"] == code
            assert error["param"].startswith("input[0]" if path == RESPONSES else "messages[0].content[0]")
        assert "passwd" not in error["message"]
    assert (await healthy(up)).status_code == 200


async def healthy(up: FleetProcess) -> httpx.Response:
    """The edge, after an attack."""
    async with up.client() as client:
        return await client.get("/health")
