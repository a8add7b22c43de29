"""The addresses that a process may connect to on behalf of a client: public ones, and networks that the operator lists.

A client that names a URL must not make a process access its private network, the machine itself or a cloud's metadata
service, whatever the notation of the address.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

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
