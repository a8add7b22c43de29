"""Adapters from a web server, a bucket and a hub: real clients against servers of this test."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from select import select

import pytest
from huggingface_hub import constants

from headwater.engines import lora_sources, public_address
from headwater.engines.lora_cache import LoraCache, LoraError, SourceMissing
from headwater.engines.lora_sources import CONFIG, FILES, WEIGHTS
from tests.support.clients.traffic import until
from tests.support.data.lora_archives import archive_of, kept
from tests.support.engines.adapters import files, make_adapter
from tests.support.media.internet import internet
from tests.support.servers.files import FileServer, file_server

LOOPBACK = ("127.0.0.0/8", "::1/128")


@pytest.fixture
def server() -> Iterator[FileServer]:
    """A web server with nothing on it."""
    with file_server() as made:
        yield made


@pytest.fixture
def cache(tmp_path: Path, server: FileServer) -> LoraCache:
    """A cache that may fetch what is below /a of it."""
    return files(tmp_path / "cache", f"{server.url}/a", networks=LOOPBACK)


@pytest.fixture
def adapter(tmp_path: Path) -> dict[str, bytes]:
    """The files of an adapter."""
    folder = make_adapter(tmp_path / "made")
    return {name: (folder / name).read_bytes() for name in FILES}


def put(server: FileServer, at: str, adapter: dict[str, bytes]) -> None:
    """Publish an adapter."""
    server.files |= {f"{at}/{name}": data for name, data in adapter.items()}


async def test_a_base_url_and_an_archive_give_the_same_adapter(
    cache: LoraCache, server: FileServer, adapter: dict[str, bytes], tmp_path: Path
) -> None:
    """With and without a slash at the end."""
    put(server, "/a/one", adapter)
    server.files["/a/one.tar.gz"] = archive_of(tmp_path / "x.tar.gz", adapter).read_bytes()
    found = await cache.fetch(f"{server.url}/a/one")
    assert (found.folder / WEIGHTS).read_bytes() == adapter[WEIGHTS]
    assert await cache.fetch(f"{server.url}/a/one/") == found
    assert await cache.fetch(f"{server.url}/a/one.tar.gz") == found


async def test_what_is_not_there_is_said_so(
    cache: LoraCache, server: FileServer, adapter: dict[str, bytes]
) -> None:
    """And a server that fails is another thing than a file that is missing."""
    with pytest.raises(SourceMissing, match=f"/a/none/{CONFIG}"):
        await cache.fetch(f"{server.url}/a/none")
    put(server, "/a/half", {CONFIG: adapter[CONFIG]})
    with pytest.raises(LoraError, match="safetensors only"):
        await cache.fetch(f"{server.url}/a/half")
    server.answers[f"/a/bad/{CONFIG}"] = lambda: (500, {}, b"")
    with pytest.raises(LoraError, match="answers 500") as caught:
        await cache.fetch(f"{server.url}/a/bad")
    assert caught.value.status == 502


async def test_an_address_that_is_not_public_is_not_asked(
    server: FileServer, adapter: dict[str, bytes], tmp_path: Path
) -> None:
    """Whether it is written as such or as a name; nothing reaches the server."""
    put(server, "/a/one", adapter)
    for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
        guarded = files(tmp_path / "cache", url)
        with pytest.raises(LoraError, match=r"not a public address; --lora-networks") as caught:
            await guarded.fetch(f"{url}/a/one")
        assert caught.value.status == 403
    assert server.asked == []
    assert kept(tmp_path) == []


async def test_a_redirect_is_followed_to_allowed_sources_only(
    cache: LoraCache, server: FileServer, adapter: dict[str, bytes]
) -> None:
    """The list and the addresses hold for every hop, and there are not many."""
    put(server, "/a/real", adapter)
    put(server, "/secret", adapter)
    for name in FILES:
        server.redirect(f"/a/moved/{name}", f"../real/{name}")
        server.redirect(f"/a/out/{name}", f"/secret/{name}")
        server.redirect(f"/a/host/{name}", f"http://169.254.169.254/{name}")
        server.redirect(f"/a/round/{name}", name)
    found = await cache.fetch(f"{server.url}/a/moved")
    assert found == await cache.fetch(f"{server.url}/a/real")
    for where in ("out", "host"):
        with pytest.raises(LoraError, match="--lora-sources") as caught:
            await cache.fetch(f"{server.url}/a/{where}")
        assert caught.value.status == 403
    assert f"/secret/{CONFIG}" not in server.asked
    with pytest.raises(LoraError, match="redirects more than 5 times"):
        await cache.fetch(f"{server.url}/a/round")


async def test_a_redirect_to_a_private_address_is_refused_where_all_hosts_are_allowed(
    server: FileServer, tmp_path: Path
) -> None:
    """The case that the guard is for: an allowed host that sends workers to their own network."""
    cache = files(tmp_path / "cache", "http://", networks=("127.0.0.1/32",))
    server.redirect(f"/{CONFIG}", f"http://127.0.0.2:{server.port}/{CONFIG}")
    server.files[f"/{CONFIG}"] = b"{}"
    with pytest.raises(LoraError, match=r"127\.0\.0\.2, which is not a public address"):
        await cache.fetch(server.url)


async def test_of_a_hosts_addresses_the_allowed_ones_are_connected_to(
    cache: LoraCache, server: FileServer, adapter: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that has a private address too is asked at the others; it is resolved once for each request."""
    put(server, "/a/one", adapter)
    answers = [["169.254.169.254", "127.0.0.1"], ["127.0.0.1"], ["169.254.169.254"]]
    monkeypatch.setattr(lora_sources, "resolve", lambda host, port: answers.pop(0))
    assert (await cache.fetch(f"{server.url}/a/one")).rank == 4
    assert len(answers) == 1
    with pytest.raises(LoraError, match=r"169\.254\.169\.254, which is not a public address"):
        await cache.fetch(f"{server.url}/a/one")


async def test_a_certificate_must_be_the_hosts(
    adapter: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is the URL's, though the connection is made to an address; the authorities are the system's."""
    monkeypatch.setattr(lora_sources, "resolve", lambda host, port: ["127.0.0.1"])
    with internet(tmp_path, "adapters.example") as net:
        for name, data in adapter.items():
            net.serve(f"/a/{name}", data)
        port = (tmp_path / "tls").read_text()
        cache = files(tmp_path / "cache", "https://", networks=LOOPBACK)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        public_address.trusted.cache_clear()
        try:
            assert (await cache.fetch(f"https://adapters.example:{port}/a")).rank == 4
            assert f"Host: adapters.example:{port}\r\n" in net.requests[0]
            with pytest.raises(LoraError, match=r"other\.example.* certificate") as caught:
                await cache.fetch(f"https://other.example:{port}/a")
        finally:
            public_address.trusted.cache_clear()
    assert caught.value.status == 502


async def test_a_body_that_breaks_off_is_no_file(
    cache: LoraCache, server: FileServer, adapter: dict[str, bytes], tmp_path: Path
) -> None:
    """However well the part of it could be read."""
    put(server, "/a/one", adapter)
    server.breaks[f"/a/one/{WEIGHTS}"] = 1
    with pytest.raises(LoraError, match="IncompleteRead") as caught:
        await cache.fetch(f"{server.url}/a/one")
    assert caught.value.status == 502
    assert kept(tmp_path) == []


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\nX-Long: "])
async def test_a_server_that_never_ends_its_answer_is_left(tmp_path: Path, begin: bytes) -> None:
    """Its connection is closed when the time for the adapter is over, however much it keeps sending."""
    left = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connected, _ = listener.accept()
            # The client closes between any two steps: what is sent then fails.
            with connected, contextlib.suppress(OSError):
                connected.sendall(begin)
                while not (select([connected], [], [], 0.02)[0] and not connected.recv(65536)):
                    if begin:
                        connected.sendall(b"a")
            left.set()

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        cache = files(tmp_path / "cache", url, networks=LOOPBACK, fetch_s=0.2)
        with pytest.raises(LoraError, match=r"within 0\.2 s"):
            await cache.fetch(f"{url}/a")
        assert await asyncio.to_thread(left.wait, 10)
        thread.join()
    # Its thread, which ends with the connection, removes what it had begun.
    await until(lambda: kept(tmp_path) == [], "the folder is removed", 10)


async def test_a_body_without_end_is_cut_at_the_limit(
    server: FileServer, adapter: dict[str, bytes], tmp_path: Path
) -> None:
    """What counts is what comes, not what was announced; packed bodies are not unpacked on the way."""
    cache = files(tmp_path / "cache", server.url, networks=LOOPBACK, bytes_max=1 << 16)
    put(server, "/a", {**adapter, WEIGHTS: bytes(1 << 20)})
    with pytest.raises(LoraError, match="--lora-max-mib"):
        await cache.fetch(f"{server.url}/a")


async def test_a_bucket(
    server: FileServer, adapter: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through S3's own protocol, with AWS's environment variables."""
    pytest.importorskip("obstore", reason="the extra `lora` is not installed")
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    cache = files(tmp_path / "cache", "s3://bucket/a", "s3://other")
    put(server, "/bucket/a/one", adapter)
    server.files["/bucket/a/one.zip"] = archive_of(tmp_path / "x.zip", adapter).read_bytes()
    found = await cache.fetch("s3://bucket/a/one")
    assert (found.folder / WEIGHTS).read_bytes() == adapter[WEIGHTS]
    assert await cache.fetch("s3://bucket/a/one.zip") == found
    with pytest.raises(SourceMissing, match=f"s3://bucket/a/none/{CONFIG}"):
        await cache.fetch("s3://bucket/a/none")
    with pytest.raises(LoraError, match="--lora-sources"):
        await cache.fetch("s3://bucket/b")


async def test_a_hub(
    server: FileServer, adapter: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through its own library: the newest revision, a named one, and what is not there."""
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        server.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    server.answers["x-commit"] = lambda: (200, {}, b"")
    cache = files(tmp_path / "cache", "hf://org")
    put(server, "/org/name/resolve/main", adapter)
    other = make_adapter(tmp_path / "other", seed=2)
    put(server, "/org/name/resolve/v2", {name: (other / name).read_bytes() for name in FILES})
    found = await cache.fetch("hf://org/name")
    assert (found.folder / WEIGHTS).read_bytes() == adapter[WEIGHTS]
    second = await cache.fetch("hf://org/name@v2")
    assert (second.folder / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()
    assert sorted(path.name for path in second.folder.iterdir()) == sorted(FILES)
    with pytest.raises(SourceMissing, match=CONFIG):
        await cache.fetch("hf://org/none")
    small = files(tmp_path / "small", "hf://org", bytes_max=100)
    with pytest.raises(LoraError, match="--lora-max-mib"):
        await small.fetch("hf://org/name")
    with pytest.raises(LoraError, match="--lora-sources"):
        await cache.fetch("hf://other/name")


async def test_a_hub_that_is_not_reachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's errors of connections are of its own HTTP client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"http://127.0.0.1:{port}/{{filename}}")
    with pytest.raises(LoraError, match="hf://org/name: ") as caught:
        await files(tmp_path / "cache", "hf://org").fetch("hf://org/name")
    assert caught.value.status == 502
