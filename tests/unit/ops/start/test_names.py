"""Names of processes that were given none."""

import os
import socket

import pytest

from headwater.ops.start.engine import rank_name, unique_name
from headwater.schemas.names import token

REPLICAS = [f"headwater-worker-of-the-second-largest-model-6d8f7c9b5d-{end}" for end in ("abcde", "vwxyz")]


def test_two_containers_of_one_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are process 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(socket, "gethostname", lambda: "worker")
    names = {unique_name() for _ in range(50)}
    assert len(names) == 50
    assert all(name.startswith("worker-") for name in names)


@pytest.mark.parametrize("host", ["", "-", "__", "Größe.example", "a" * 63, *REPLICAS])
def test_any_host_name_makes_a_valid_name(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """A token, that of a rank too, and not one of the reserved names."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    name = unique_name()
    token("worker", rank_name(name, 255))
    assert not name.startswith("__")


def test_the_end_of_a_long_host_name_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells replicas apart for those who read it."""
    for host in REPLICAS:
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert host[-5:] in unique_name()
