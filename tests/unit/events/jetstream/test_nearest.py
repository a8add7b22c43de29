"""Servers of this machine are connected to first."""

import socket

import pytest

from headwater.events.jetstream import connection
from headwater.events.jetstream.connection import address_towards_any, nearest_first, own_address_towards

HERE = ["nats://127.0.0.1:4222", "nats://localhost:4223", "nats://u:p@[::1]:4224"]
FAR = ["nats://203.0.113.7:4222", "nats://203.0.113.8", "nats://no.such.name.invalid:4222", "nats://:x"]


@pytest.fixture(autouse=True)
def ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and ways as on a host with a network, whatever this machine has."""

    def towards(host: str, _: int) -> str:
        if host.startswith("203."):
            return "192.0.2.1"
        if host.endswith("invalid"):
            raise socket.gaierror(-2, "unknown")
        return ""

    monkeypatch.setattr(connection, "own_address_towards", towards)


async def test_those_on_this_machine_come_first_and_none_is_left_out() -> None:
    """The others in any order; what cannot be looked up counts as far."""
    orders = set()
    for _ in range(40):
        found = await nearest_first([*FAR, *HERE])
        assert set(found[: len(HERE)]) == set(HERE)
        assert sorted(found) == sorted([*FAR, *HERE])
        orders.add(tuple(found))
    assert len(orders) > 1
    assert await nearest_first(FAR[:1]) == FAR[:1]


def test_the_own_address_matters_only_where_no_server_is_here() -> None:
    """One that cannot be looked up says nothing."""
    assert address_towards_any(FAR) == "192.0.2.1"
    assert address_towards_any([*FAR, HERE[0]]) == ""
    assert address_towards_any(FAR[2:]) == ""


def test_loopback_is_here() -> None:
    """Asked of the system itself."""
    assert own_address_towards("127.0.0.1", 1) == ""
