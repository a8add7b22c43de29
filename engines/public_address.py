"""The addresses that a process may connect to on behalf of a client, and HTTP requests to such addresses.

A client that names a URL must not make a process access its private network, the machine itself or a cloud's metadata
service, whatever the notation of the address. Allowed are public addresses, and networks that the operator lists.

A host is resolved once for a request, and the socket is connected to an address that was checked: a second look-up could
have another answer. There is no proxy in between, whose address would be checked instead, and redirects are left to the
caller, who checks where they lead.
"""

import http.client
import socket
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from threading import Thread
from typing import Final, NamedTuple, ParamSpec, TypeVar
from urllib.parse import quote

from headwater.schemas.names import host_port

P = ParamSpec("P")
T = TypeVar("T")

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

GLOBAL_UNICAST: Final = ip_network("2000::/3")
"""All of IPv6 that is assigned to the public Internet."""

NAT64: Final = ip_network("64:ff9b::/96")
"""What DNS64 returns for IPv4 servers in networks without IPv4 (RFC 6052): the last 32 bits are the address."""

NEVER_PUBLIC: Final = tuple(
    ip_network(text)
    for text in (
        "192.0.0.0/24",  # protocol assignments; a cloud's metadata service is at 192.0.0.192
        "192.88.99.0/24",  # relays of 6to4 (RFC 7526)
        "168.63.129.16/32",  # a cloud's own services, on an address that is public by its number
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: reaches whatever is behind the IPv4 address in it
        "3fff::/20",  # documentation (RFC 9637)
    )
)
"""Networks that `is_global` of some Python releases takes for public, or that lead elsewhere."""


def may_connect(text: str, networks: Sequence[Network] = ()) -> bool:
    """Return whether a socket may be connected to this address: a public one, or one of `networks`. A scope id is ignored."""
    address = unwrapped(ip_address(text.partition("%")[0]))
    if any(address.version == network.version and address in network for network in networks):
        return True
    return is_public(address)


def unwrapped(address: Address) -> Address:
    """The IPv4 address that packets to this IPv6 address go to, if any: of the mapped form and of NAT64."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def is_public(address: Address) -> bool:
    """Return whether this is a unicast address of the public Internet."""
    if address.is_multicast or not address.is_global:
        return False
    if address.version == 6 and address not in GLOBAL_UNICAST:
        return False
    return not any(address.version == network.version and address in network for network in NEVER_PUBLIC)


# Requests to checked addresses. All of this blocks.

PORTS: Final = {"https": 443, "http": 80}

REDIRECTS: Final = (301, 302, 303, 307, 308)

CONNECT_S: Final = 2.0
"""Then the next address is tried: of a host whose IPv6 leads nowhere, say."""

_ASCII: Final = "".join(map(chr, range(0x21, 0x7F)))


class WebUrl(NamedTuple):
    """An http or https URL. `host` is lower case without brackets; `target` is the path and query, as sent."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def is_address(self) -> bool:
        """True if the host is an IP address."""
        return ":" in self.host or self.host.rpartition(".")[2].isdigit()

    @property
    def host_header(self) -> str:
        """The host as the request's header has it."""
        authority = host_port(self.host, self.port)
        return authority.rpartition(":")[0] if self.port == PORTS[self.scheme] else authority

    @property
    def origin(self) -> str:
        """The URL for messages, without the path, which may contain secrets."""
        return f"{self.scheme}://{self.host_header}"


def request_target(path: str, query: str = "") -> str:
    """The path and query of a URL as a request has them: what is not ASCII is percent-encoded."""
    target = quote(path or "/", safe=_ASCII) + (f"?{quote(query, safe=_ASCII)}" if query else "")
    return target if target.startswith("/") else f"/{target}"


def in_own_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Future[T]:
    """Run what waits for servers in a thread that the end of the process does not wait for."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(function(*arguments, **named))
        except BaseException as error:  # raised again by whoever waits
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, as the system's resolver returns them. Raises `OSError`."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


def connect(address: str, port: int) -> socket.socket:
    """A TCP connection to an IP address, within `CONNECT_S` seconds; then without a time limit. Raises `OSError`."""
    connected = socket.create_connection((address, port), CONNECT_S)
    connected.settimeout(None)
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


def connect_first(url: WebUrl, addresses: Sequence[str], network: WebAccess) -> socket.socket:
    """A connection to the first of these addresses that accepts one. A certificate must be for the URL's host.

    Raises the last address's `OSError`.
    """
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
    raise OSError(f"{url.host} has no address")


def request_file(url: WebUrl, connected: socket.socket, agent: str) -> http.client.HTTPResponse:
    """Request the file at `url` on a connection to its host, and return the response without its body.

    The request says nothing of this process but `agent`. Raises `OSError` and `HTTPException`.
    """
    connection = http.client.HTTPConnection(url.host, url.port)
    connection.auto_open = 0  # a second connection would resolve the name again
    connection.sock = connected
    connection.putrequest("GET", url.target, skip_host=True, skip_accept_encoding=True)
    for name, value in (
        ("Host", url.host_header),
        ("User-Agent", agent),
        ("Accept", "*/*"),
        ("Accept-Encoding", "identity"),
        ("Connection", "close"),
    ):
        connection.putheader(name, value)
    connection.endheaders()
    return connection.getresponse()
