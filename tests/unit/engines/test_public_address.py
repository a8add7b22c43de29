"""Which addresses a process may connect to on behalf of a client."""

import threading
from ipaddress import ip_network

import pytest

from headwater.engines.public_address import in_own_thread, may_connect

EVERYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "172.16.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "192.88.99.1",
        "198.18.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "::127.0.0.1",
        "::8.8.8.8",
        "fe80::1%eth0",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "ff0e::1",
        "::ffff:127.0.0.1",
        "::ffff:a9fe:a9fe",
        "64:ff9b::7f00:1",
        "64:ff9b:1::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:808:808::1",
        "3fff::1",
        "5f00::1",
        "100::1",
    ],
)
def test_an_address_that_is_not_public_is_refused_unless_its_network_is_listed(address: str) -> None:
    """IPv4 inside IPv6 too."""
    assert not may_connect(address)
    assert may_connect(address, EVERYWHERE)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]
)
def test_a_public_address_is_allowed(address: str) -> None:
    """DNS64's form of one too, without which networks of IPv6 alone reach nothing."""
    assert may_connect(address)


def test_a_network_allows_what_is_in_it() -> None:
    """Also in the mapped form, and nothing else."""
    loopback = (ip_network("127.0.0.0/8"),)
    assert may_connect("127.0.0.1", loopback)
    assert may_connect("::ffff:127.0.0.1", loopback)
    assert not may_connect("10.0.0.1", loopback)
    assert not may_connect("::1", loopback)


def test_what_waits_for_a_server_does_not_hold_up_the_end_of_a_process() -> None:
    """And whoever waits for it gets its result, or its error."""
    assert in_own_thread(threading.current_thread).result().daemon
    with pytest.raises(ZeroDivisionError):
        in_own_thread(divmod, 1, 0).result()
