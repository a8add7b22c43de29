"""Leases of dead processes: those of this machine alone."""

import socket

import pytest

from headwater.actors.runtime.lease import take
from headwater.actors.runtime.tables import LeaseTable
from headwater.events.memory import MemoryTable
from headwater.ops.start.actor import revoke_leases_of
from tests.support.worlds.clock import ManualClock


@pytest.mark.parametrize(("where", "revoked"), [("here", True), ("elsewhere", False)])
async def test_a_process_of_another_machine_keeps_its_lease(
    monkeypatch: pytest.MonkeyPatch, where: str, revoked: bool
) -> None:
    """In containers every process has the same few ids."""
    clock = ManualClock()
    table = MemoryTable(clock)
    monkeypatch.setattr("os.getpid", lambda: 7)
    monkeypatch.setattr(socket, "gethostname", lambda: where)
    await take(table, "worker", "worker-0", clock, ids="i1")
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    assert await revoke_leases_of(table, "worker", "worker-0", 7) is revoked
    assert (await LeaseTable(table).get("worker", "worker-0") is None) is revoked
