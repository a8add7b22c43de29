"""URLs of media, taken apart once: what is checked here is what is connected to.

Notations that parsers read differently are rejected instead of interpreted: backslashes, user names, control characters,
IPv4 addresses in any form but four decimal numbers, hosts that are not ASCII.
"""

import re
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address
from typing import Final, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from headwater.actors.media.request.errors import MediaCode, MediaError
from headwater.actors.media.request.settings import FetchPolicy
from headwater.schemas.addresses import host_port

URL_CHARS_MAX: Final = 8192
HOST_CHARS_MAX: Final = 253

PORTS: Final = {"https": 443, "http": 80}

_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")
_ASCII = "".join(map(chr, range(0x21, 0x7F)))


class WebUrl(NamedTuple):
    """An http or https URL. `host` is lower case without brackets; `target` is the path and query, as sent."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def is_address(self) -> bool:
        """Whether the host is an IP address."""
        return ":" in self.host or self.host.rpartition(".")[2].isdigit()

    @property
    def host_header(self) -> str:
        """The host as the request's header has it."""
        whole = host_port(self.host, self.port)
        return whole.rpartition(":")[0] if self.port == PORTS[self.scheme] else whole

    @property
    def origin(self) -> str:
        """For messages: without the path, which may contain secrets."""
        return f"{self.scheme}://{self.host_header}"


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
        _target(parts.path, parts.query),
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
    """Where a redirect leads, checked like a URL of a client. Raises `MediaError`."""
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


def _target(path: str, query: str) -> str:
    target = quote(path or "/", safe=_ASCII) + (f"?{quote(query, safe=_ASCII)}" if query else "")
    return target if target.startswith("/") else f"/{target}"


def _matches(host: str, pattern: str) -> bool:
    pattern = pattern.lower().rstrip(".")
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and host != pattern[2:]
    return host == pattern


def check_addresses(url: WebUrl, addresses: Sequence[str], allowed: Sequence[bool]) -> None:
    """Raises `MediaError` if the host has no address, or one that must not be connected to."""
    if not addresses:
        raise MediaError(MediaCode.DNS, f"The host {url.host!r} has no address.")
    if not all(allowed):
        raise MediaError(
            MediaCode.PRIVATE_ADDRESS,
            f"The host {url.host!r} is not at a public address. Media are fetched from the public Internet only.",
        )


def _bad(reason: str) -> MediaError:
    return MediaError(MediaCode.BAD_URL, f"The URL of the media is invalid: {reason}.")


def _bad_host(reason: str) -> MediaError:
    return MediaError(MediaCode.BAD_HOST, f"The host in the URL of the media is invalid: {reason}.")
