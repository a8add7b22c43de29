"""Media over https and http: names are resolved once per hop, and the socket is connected to the checked address.

Everything here blocks; it runs in a process of its own, under an alarm (`deadline`) that bounds all of it, however slowly a
server sends.
"""

import http.client
import socket
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from ipaddress import ip_network
from threading import Thread
from typing import BinaryIO, Final, NamedTuple

from headwater.actors.media.request.errors import MediaCode, MediaError
from headwater.actors.media.request.settings import FetchPolicy
from headwater.actors.media.sources.url import WebUrl, check_addresses, parse_redirect, parse_web_url
from headwater.engines.public_address import may_connect

CHUNK_BYTES: Final = 64 * 1024
ADDRESSES_MAX: Final = 4
"""Addresses of a host that are tried, one after the other."""

CONNECT_S: Final = 2.0
"""Then the next address is tried: of a host whose IPv6 leads nowhere, say."""

REDIRECTS: Final = (301, 302, 303, 307, 308)

USER_AGENT: Final = "headwater-media"


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, as the system's resolver returns them. Raises `OSError`."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def connect(address: str, port: int) -> socket.socket:
    """A TCP connection to an IP address, within `CONNECT_S` seconds. Raises `OSError`."""
    connected = socket.create_connection((address, port), CONNECT_S)
    connected.settimeout(None)  # the alarm bounds everything else
    return connected


@cache
def trusted() -> ssl.SSLContext:
    """The system's certificate authorities. Read once: that takes tens of milliseconds."""
    return ssl.create_default_context()


class WebAccess(NamedTuple):
    """How hosts are resolved and connected to, and which certificates are trusted. Tests have one of their own."""

    resolve: Callable[[str, int], list[str]] = resolve
    connect: Callable[[str, int], socket.socket] = connect
    tls: Callable[[], ssl.SSLContext] = trusted


def fetch_web(text: str, policy: FetchPolicy, network: WebAccess, bytes_max: int, out: BinaryIO) -> None:
    """Write the body at this URL to `out`. Raises `MediaError`."""
    url = parse_web_url(text, policy)
    for _ in range(policy.redirects_max + 1):
        onward = _get(url, policy, network, bytes_max, out)
        if not onward:
            return
        url = parse_redirect(url, onward, policy)
    raise MediaError(
        MediaCode.REDIRECTS, f"The URL of the media redirects more than {policy.redirects_max} times."
    )


def _get(url: WebUrl, policy: FetchPolicy, network: WebAccess, bytes_max: int, out: BinaryIO) -> str:
    """One request; returns where a redirect leads, or "" once the body is written."""
    try:
        with _connected(url, _addresses(url, policy, network), network) as connected:
            response = _ask(url, connected)
            if response.status in REDIRECTS:
                return _location(url, response)
            if response.status != 200:
                raise MediaError(
                    MediaCode.FETCH_FAILED, f"{url.origin} answers with status {response.status}."
                )
            _save(url, response, bytes_max, out)
            return ""
    except http.client.HTTPException as error:
        raise _bad_response(url, f"is no valid HTTP ({type(error).__name__})") from error
    except ssl.SSLError as error:
        raise MediaError(
            MediaCode.FETCH_FAILED, f"TLS with {url.origin} failed: {error.reason or error}."
        ) from error
    except OSError as error:
        raise MediaError(MediaCode.FETCH_FAILED, f"The connection to {url.origin} failed.") from error


def _addresses(url: WebUrl, policy: FetchPolicy, network: WebAccess) -> list[str]:
    """The addresses to try. Every address of the host is checked, so that none is public by chance. Raises `MediaError`."""
    try:
        addresses = [url.host] if url.is_address else _resolved(url, network)
    except (OSError, UnicodeError) as error:
        raise MediaError(MediaCode.DNS, f"The host {url.host!r} was not found.") from error
    networks = [ip_network(text) for text in policy.networks]
    check_addresses(url, addresses, [may_connect(one, networks) for one in addresses])
    return addresses[:ADDRESSES_MAX]


def _resolved(url: WebUrl, network: WebAccess) -> list[str]:
    """In a thread: an alarm does not interrupt the system's resolver, but it does a wait for a thread."""
    found: Future[list[str]] = Future()

    def run() -> None:
        try:
            found.set_result(network.resolve(url.host, url.port))
        except Exception as error:  # raised again by the thread that waits
            found.set_exception(error)

    Thread(target=run, daemon=True).start()
    return found.result()


def _connected(url: WebUrl, addresses: Sequence[str], network: WebAccess) -> socket.socket:
    """A connection to the first address that accepts one. A certificate must be for the URL's host."""
    for number, address in enumerate(addresses, 1):
        try:
            plain = network.connect(address, url.port)
        except OSError:
            if number == len(addresses):
                raise
            continue
        if url.scheme == "http":
            return plain
        return network.tls().wrap_socket(plain, server_hostname=url.host)
    raise AssertionError("a host without addresses was rejected before")


def _ask(url: WebUrl, connected: socket.socket) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(url.host, url.port)
    connection.auto_open = 0  # a second connection would resolve the name again
    connection.sock = connected
    connection.putrequest("GET", url.target, skip_host=True, skip_accept_encoding=True)
    for name, value in (
        ("Host", url.host_header),
        ("User-Agent", USER_AGENT),
        ("Accept", "*/*"),
        ("Accept-Encoding", "identity"),
        ("Connection", "close"),
    ):
        connection.putheader(name, value)
    connection.endheaders()
    return connection.getresponse()


def _location(url: WebUrl, response: http.client.HTTPResponse) -> str:
    location = response.getheader("location")
    if not location:
        raise _bad_response(url, "is a redirect without a location")
    return location


def _save(url: WebUrl, response: http.client.HTTPResponse, bytes_max: int, out: BinaryIO) -> None:
    """Write the body, counted as it arrives."""
    declared = _declared_length(url, response)
    if declared is not None and declared > bytes_max:
        raise too_large(bytes_max)
    got = 0
    while chunk := response.read(CHUNK_BYTES):
        got += len(chunk)
        if got > bytes_max:
            raise too_large(bytes_max)
        out.write(chunk)
    if declared is not None and got != declared:
        raise MediaError(
            MediaCode.LENGTH_MISMATCH, f"{url.origin} announced {declared} bytes and sent {got}. Try again."
        )


def _declared_length(url: WebUrl, response: http.client.HTTPResponse) -> int | None:
    if response.getheader("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise MediaError(
            MediaCode.CONTENT_ENCODING,
            f"{url.origin} sends a compressed body, though asked for an identical one.",
        )
    lengths = response.headers.get_all("content-length", [])
    if len(lengths) > 1 or (lengths and response.headers.get_all("transfer-encoding")):
        raise _bad_response(url, "states its length twice")
    if not lengths:
        return None
    if not (lengths[0].isascii() and lengths[0].isdigit()):
        raise _bad_response(url, "has a malformed length")
    return int(lengths[0])


def too_large(bytes_max: int) -> MediaError:
    """The error for too many bytes."""
    return MediaError(MediaCode.TOO_LARGE, f"The file of the media has more than {bytes_max} bytes.")


def _bad_response(url: WebUrl, reason: str) -> MediaError:
    return MediaError(MediaCode.BAD_RESPONSE, f"The response of {url.origin} {reason}.")
