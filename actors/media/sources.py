"""Sources of media: inline in the request, files, and web servers.

Notations that parsers read differently are rejected instead of interpreted: backslashes, user names, control characters,
IPv4 addresses in any form but four decimal numbers, hosts that are not ASCII.

Everything here blocks; it runs in a process of its own, under an alarm (`deadline`) that bounds all of it, however slowly a
server sends.
"""

import binascii
import http.client
import os
import re
import ssl
import stat
from ipaddress import IPv6Address, ip_address, ip_network
from mmap import ACCESS_READ, mmap
from pathlib import PurePosixPath
from typing import BinaryIO, Final
from urllib.parse import unquote, unquote_to_bytes, urljoin, urlsplit

from headwater.actors.media.request import Encoding, FetchPolicy, MediaCode, MediaError
from headwater.engines.public_address import (
    PORTS,
    REDIRECTS,
    WebAccess,
    WebUrl,
    connect_first,
    in_own_thread,
    may_connect,
    request_file,
    request_target,
)

URL_CHARS_MAX: Final = 8192
HOST_CHARS_MAX: Final = 253

_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")


def scheme_of(text: str) -> str:
    """The scheme in lower case, "" if there is none."""
    scheme, mark, _ = text[:16].partition(":")
    return scheme.lower() if mark else ""


def check_scheme(scheme: str, policy: FetchPolicy) -> None:
    """Raises `MediaError` unless the policy has the scheme."""
    if scheme not in policy.schemes:
        allowed = ", ".join(policy.schemes) or "none"
        raise MediaError(
            MediaCode.SCHEME,
            f"URLs of media must have one of these schemes: {allowed}; this one has {scheme!r}.",
        )


def parse_web_url(text: str, policy: FetchPolicy) -> WebUrl:
    """An http or https URL that the policy allows. The host is not resolved yet. Raises `MediaError`."""
    if len(text) > URL_CHARS_MAX:
        raise _bad(f"it has more than {URL_CHARS_MAX} characters")
    if _FORBIDDEN.search(text):
        raise _bad("it has a backslash, a space or a control character; percent-encode them")
    scheme = scheme_of(text)
    check_scheme(scheme, policy)
    if not text[len(scheme) :].startswith("://"):
        raise _bad(f"it must begin with {scheme}://")
    try:
        parts = urlsplit(text)
        if "@" in parts.netloc:
            raise _bad("it must not have a user name or password")
        # `hostname` forgives text around brackets.
        host, port = _split_host(parts.netloc), parts.port
    except ValueError as error:
        raise _bad("its host or port is malformed") from error
    url = WebUrl(
        scheme,
        _checked_host(host),
        port if port is not None else PORTS[scheme],
        request_target(parts.path, parts.query),
    )
    if port is not None and url.port != PORTS[scheme] and url.port not in policy.ports:
        raise MediaError(
            MediaCode.PORT, f"Media are not fetched from port {url.port}. Use the scheme's own port."
        )
    if policy.hosts and not any(_matches(url.host, pattern) for pattern in policy.hosts):
        raise MediaError(
            MediaCode.HOST, f"Media are not fetched from {url.host!r}, which is not an allowed host."
        )
    return url


def parse_redirect(base: WebUrl, location: str, policy: FetchPolicy) -> WebUrl:
    """Return the URL that a redirect leads to, checked like a URL of a client. Raises `MediaError`."""
    if len(location) > URL_CHARS_MAX or _FORBIDDEN.search(location):
        raise MediaError(MediaCode.BAD_RESPONSE, f"{base.origin} redirects to a malformed URL.")
    joined = urljoin(f"{base.origin}{base.target}", location)
    if base.scheme == "https" and scheme_of(joined) == "http":
        raise MediaError(
            MediaCode.DOWNGRADE, f"{base.origin} redirects from https to http, which is not followed."
        )
    if scheme_of(joined) not in PORTS:
        raise MediaError(
            MediaCode.SCHEME, f"{base.origin} redirects to a URL that is neither https nor http."
        )
    return parse_web_url(joined, policy)


def _split_host(netloc: str) -> str:
    if netloc.startswith("["):
        host, mark, rest = netloc[1:].partition("]")
        if not mark or (rest and not rest.startswith(":")):
            raise ValueError("malformed brackets")
        return f"[{host}]"
    host, _, rest = netloc.partition(":")
    if ":" in rest:
        raise ValueError("an IPv6 address without brackets")
    return host


def _checked_host(host: str) -> str:
    """A name, an IPv4 address of four decimal numbers, or an IPv6 address. Raises `MediaError`."""
    if host.startswith("["):
        if "%" in host:
            raise _bad_host("an IPv6 address must not have a zone")
        try:
            return str(IPv6Address(host[1:-1]))
        except ValueError as error:
            raise _bad_host("it is no IPv6 address") from error
    host = host.lower()
    if not host.isascii():
        raise _bad_host("write names in other alphabets as DNS has them (xn--…)")
    # One final dot marks a full name; two are malformed.
    labels = host.removesuffix(".").split(".")
    if len(host) > HOST_CHARS_MAX or not all(_LABEL.fullmatch(label) for label in labels):
        raise _bad_host("it is no host name")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return str(ip_address(host))
        except ValueError as error:
            raise _bad_host("write an IPv4 address as four decimal numbers") from error
    return ".".join(labels)


def _matches(host: str, pattern: str) -> bool:
    pattern = pattern.lower().rstrip(".")
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and host != pattern[2:]
    return host == pattern


def _bad(reason: str) -> MediaError:
    return MediaError(MediaCode.BAD_URL, f"The URL of the media is invalid: {reason}.")


def _bad_host(reason: str) -> MediaError:
    return MediaError(MediaCode.BAD_HOST, f"The host in the URL of the media is invalid: {reason}.")


# Web servers: every hop's host is resolved once, and checked.

CHUNK_BYTES: Final = 64 * 1024
ADDRESSES_MAX: Final = 4
"""Addresses of a host that are tried, one after the other."""

USER_AGENT: Final = "headwater-media"


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
        addresses = _addresses(url, policy, network)
        with (
            connect_first(url, addresses, network) as connected,
            request_file(url, connected, USER_AGENT) as response,
        ):
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
        if url.is_address:
            addresses = [url.host]
        else:
            # The alarm does not interrupt the system's resolver, but it does a wait for a thread.
            addresses = in_own_thread(network.resolve, url.host, url.port).result()
    except (OSError, UnicodeError) as error:
        raise MediaError(MediaCode.DNS, f"The host {url.host!r} was not found.") from error
    if not addresses:
        raise MediaError(MediaCode.DNS, f"The host {url.host!r} has no address.")
    networks = [ip_network(text) for text in policy.networks]
    if not all(may_connect(address, networks) for address in addresses):
        raise MediaError(
            MediaCode.PRIVATE_ADDRESS,
            f"The host {url.host!r} is not at a public address. Media are fetched from the public Internet only.",
        )
    return addresses[:ADDRESSES_MAX]


def _location(url: WebUrl, response: http.client.HTTPResponse) -> str:
    location = response.getheader("location")
    if not location:
        raise _bad_response(url, "is a redirect without a location")
    return location


def _save(url: WebUrl, response: http.client.HTTPResponse, bytes_max: int, out: BinaryIO) -> None:
    """Write the body."""
    declared = _declared_length(url, response)
    if declared is not None and declared > bytes_max:
        raise too_large(bytes_max)
    got = _copy(response, bytes_max, out)
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


# Folders that the operator lists. No link below them is followed, so none leads out of them.

_STEP: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def copy_file(url: str, policy: FetchPolicy, bytes_max: int, out: BinaryIO) -> None:
    """Write the file at a file URL to `out`. Raises `MediaError`."""
    check_scheme("file", policy)
    path = _path_of(url)
    for folder in policy.directories:
        root = PurePosixPath(folder)
        if path.is_relative_to(root) and path != root:
            with _open_below(folder, path.relative_to(root)) as file:
                _copy(file, bytes_max, out)
            return
    raise MediaError(MediaCode.PATH, "The file is not in a folder that media may be read from.")


def _path_of(url: str) -> PurePosixPath:
    """The absolute path, without any `..`: a path is compared with folders as it is written."""
    parts = urlsplit(url)
    text = unquote(parts.path)
    bad = parts.netloc not in ("", "localhost") or parts.query or parts.fragment
    if bad or "\0" in text or "\\" in text or not text.startswith("/"):
        raise MediaError(MediaCode.BAD_URL, "Write URLs of files as file:///FOLDER/FILE.")
    path = PurePosixPath("/" + text.lstrip("/"))
    if ".." in path.parts:
        raise MediaError(MediaCode.PATH, "The path of a file must not contain `..`.")
    return path


def _open_below(folder: str, path: PurePosixPath) -> BinaryIO:
    """Open each folder on the way below the one before, so that nothing can be exchanged in between."""
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in path.parts[:-1]:
                below = os.open(name, _STEP | os.O_DIRECTORY, dir_fd=at)
                os.close(at)
                at = below
            # Not blocking: opening a pipe without a writer waits for one.
            descriptor = os.open(path.name, _STEP | os.O_NONBLOCK, dir_fd=at)
        finally:
            os.close(at)
    except OSError as error:
        raise MediaError(
            MediaCode.PATH, "The file does not exist, or cannot be read, or is a link."
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MediaError(MediaCode.PATH, "The path does not name a file.")
    return os.fdopen(descriptor, "rb")


def _copy(file: BinaryIO | http.client.HTTPResponse, bytes_max: int, out: BinaryIO) -> int:
    """Write what is left of `file`, counted as it arrives; returns how many bytes."""
    got = 0
    while chunk := file.read(CHUNK_BYTES):
        got += len(chunk)
        if got > bytes_max:
            raise too_large(bytes_max)
        out.write(chunk)
    return got


# Inline media: data URLs (RFC 2397), base64 and plain bytes.

HEAD_BYTES_MAX: Final = 1024
"""The longest head of a data URL, up to its comma."""

_SPACE = re.compile(rb"[\t\n\f\r ]+")
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def encoded_bytes_max(encoding: Encoding, bytes_max: int) -> int:
    """Return how long the text of an item may be whose file has at most `bytes_max`: with line breaks, and percent-encoded."""
    if encoding == "raw":
        return bytes_max
    if encoding == "base64":
        return bytes_max * 4 // 3 * 80 // 76 + 64
    return bytes_max * 3 + HEAD_BYTES_MAX


def decode_inline(
    encoding: Encoding, content: BinaryIO, policy: FetchPolicy, bytes_max: int, out: BinaryIO
) -> None:
    """Write the bytes that `content` stands for to `out`. Raises `MediaError`."""
    if not content.seek(0, 2):
        return
    with mmap(content.fileno(), 0, access=ACCESS_READ) as mapped_file, memoryview(mapped_file) as text:
        data: bytes | memoryview
        if encoding == "raw":
            data = text
        elif encoding == "base64":
            data = decode_base64(text)
        else:
            check_scheme("data", policy)
            data = _decode_data_url(text)
        try:
            if len(data) > bytes_max:
                raise too_large(bytes_max)
            out.write(data)
        finally:
            if isinstance(data, memoryview):
                data.release()


def _decode_data_url(text: memoryview) -> bytes:
    """Its declared type is ignored: the first bytes of the data decide."""
    head, mark, _ = bytes(text[:HEAD_BYTES_MAX]).partition(b",")
    if not mark or head[:5].lower() != b"data:":
        raise MediaError(MediaCode.BAD_URL, "The data URL has no comma. Write data:image/png;base64,DATA.")
    body = text[len(head) + 1 :]
    try:
        if head.rpartition(b";")[2].strip().lower() == b"base64":
            return decode_base64(body)
        return unquote_to_bytes(bytes(body))
    finally:
        body.release()


def decode_base64(text: memoryview | bytes) -> bytes:
    """Forgiving as browsers are: white space, missing padding, percent-encoding, and the alphabet for URLs."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error:
        pass
    plain = bytes(text)
    if b"%" in plain:
        plain = unquote_to_bytes(plain)
    plain = _SPACE.sub(b"", plain).translate(_URL_SAFE).rstrip(b"=")
    try:
        return binascii.a2b_base64(plain + b"=" * (-len(plain) % 4), strict_mode=True)
    except binascii.Error as error:
        raise MediaError(MediaCode.BAD_BASE64, "The base64 of the media is invalid.") from error
