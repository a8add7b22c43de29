"""What is wrong with a NATS server, by what it says of itself."""

from typing import Any

import pytest

from headwater.ops.nats.server import MAX_PAYLOAD, ServerFacts, check_server, server_facts, version_of

GOOD = ServerFacts("nats://127.0.0.1:4222", "2.15.1", MAX_PAYLOAD)


def ids(facts: ServerFacts) -> list[str]:
    """The findings' names."""
    return [one.id for one in check_server(facts)]


def test_a_good_server_has_no_finding() -> None:
    """Also with a login on all addresses, and with a monitoring port that was asked."""
    assert ids(GOOD) == []
    assert ids(GOOD._replace(host="0.0.0.0", logged_in=True)) == []
    assert ids(GOOD._replace(sync_s=120.0, frozen={})) == []
    assert ids(GOOD._replace(sync_s=600.0, sync_always=True)) == []
    assert ids(GOOD._replace(storage=10**12, storage_max=-1)) == []


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"version": "2.13.9"}, ["nats-old"]),
        ({"version": "2.14.0-RC.1"}, []),
        ({"version": "2.12.2"}, ["nats-old", "nats-faulty"]),
        ({"version": "2.10.21"}, ["nats-old", "nats-faulty"]),
        ({"version": "of my own"}, []),
        ({"jetstream": False}, ["jetstream-off"]),
        ({"max_payload": 1 << 20}, ["payload-small"]),
        ({"sync_s": 121.0}, ["sync-rare"]),
        ({"frozen": {"HW_ns_REQ": "write error: no space"}}, ["store-frozen"]),
        ({"storage": 91, "storage_max": 100}, ["store-full"]),
        ({"host": "0.0.0.0"}, ["nats-open"]),
        ({"host": "::"}, ["nats-open"]),
    ],
)
def test_each_fault_is_one_finding(change: dict[str, Any], wanted: list[str]) -> None:
    """Of the table."""
    assert ids(GOOD._replace(**change)) == wanted


def test_a_fault_names_the_release_that_has_all_repairs() -> None:
    """Of 2.10.21 both known faults, and the later repair."""
    (fault,) = [one for one in check_server(GOOD._replace(version="2.10.21")) if one.id == "nats-faulty"]
    assert "whole stream" in fault.text
    assert "members" in fault.text
    assert fault.text.endswith("fixed in 2.12.3")


def test_a_greeting_of_a_cluster_without_a_store_of_its_own_is_no_fault() -> None:
    """Another server of it may have one."""
    greeting = {"version": "2.15.1", "max_payload": MAX_PAYLOAD, "host": "127.0.0.1"}
    assert [one.id for one in check_server(server_facts("u", greeting))] == ["jetstream-off"]
    assert check_server(server_facts("u", {**greeting, "cluster": "c"})) == []
    assert check_server(server_facts("u", {**greeting, "jetstream": True})) == []


def test_versions_are_numbers() -> None:
    """What follows them is of no importance."""
    assert version_of("2.15.1-beta.2") == (2, 15, 1)
    assert version_of("2.15") is None
