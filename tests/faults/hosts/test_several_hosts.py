"""The short forms of `tests.faults.hosts.several_hosts`, and addresses that a host does not reach."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.schemas.names import NATS_PORT
from tests.faults.hosts.several_hosts import HOSTS, Shape, several_hosts
from tests.support.engines import tiny_model
from tests.support.network.hosts import Network, needs_hosts, network

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240), needs_hosts]

TRY = """
import asyncio, sys
from headwater.actors.worker.handoffs import Reach
from headwater.schemas.clock import SystemClock
reach = Reach(SystemClock())
for place in sys.argv[1:]:
    print(asyncio.run(reach.refusal("prefill-0", place)))
"""
LISTEN = "import socket, time; s = socket.create_server(('0.0.0.0', 9000)); print('up', flush=True); time.sleep(600)"


async def test_a_host_that_is_cut_off_costs_no_stream_a_token(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Its edge, its router and its decode worker are away for a while, and each decode worker is killed: answers pause, continue elsewhere, and are whole."""
    seed = request.config.getoption("randomly_seed")
    shape = Shape(servers=1, answer_s=3.0, streams=3, round_trip_s=0.01)
    faults = [(0.4, "beta", 1.5), (2.2, "decode-1", 0.0), (2.8, "decode-3", 0.0)]
    report = await several_hosts(tmp_path, seconds=3.2, seed=seed, shape=shape, faults=faults)
    report.check()


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_kills_and_partitions_with_nixl_between_hosts(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A NATS server, an edge and a router on each of three hosts, and KV of vLLM by NIXL from the first to the last."""
    seed = request.config.getoption("randomly_seed")
    report = await several_hosts(tmp_path, seconds=60.0, seed=seed, shape=Shape(vllm=True))
    report.check()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Network]:
    """Two hosts."""
    with network(tmp_path, *HOSTS[:2]) as made:
        yield made


def test_an_address_that_is_not_reached_is_told_with_its_remedy(hosts: Network, tmp_path: Path) -> None:
    """A loopback address, a port where nobody listens, a host that is cut off: each within seconds; and one that is reached is not."""
    here, there = hosts.hosts

    def tried(*places: str) -> list[str]:
        return here.run(sys.executable, "-c", TRY, *places).splitlines()

    listening = tmp_path / "listener.log"
    with listening.open("wb") as output:
        listener = there.popen(sys.executable, "-c", LISTEN, output=output)
    try:
        while not listening.read_text():
            assert listener.poll() is None
        reached = f"{there.address}:9000"
        told = tried(reached, "127.0.0.1:9000", f"{there.address}:9001")
        assert told[0] == ""
        assert "connection refused; it is a loopback address" in told[1]
        assert f"worker prefill-0 hands its KV over at {there.address}:9001" in told[2]
        assert "connection refused): start that worker with --handoff-host" in told[2]
        hosts.isolate(here)
        [told_apart] = tried(reached)
        assert "no answer within 2 s" in told_apart
    finally:
        listener.kill()
        listener.wait()


@pytest.mark.vllm
@pytest.mark.soak
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "--handoff-host is missing: NATS is on another machine"),
        (("--handoff-host", "0.0.0.0"), "--handoff-host 0.0.0.0: other workers are told this address"),
        (("--handoff-host", "198.18.255.1"), "--handoff-host 198.18.255.1: it is no address of this machine"),
    ],
)
async def test_a_worker_that_others_could_not_reach_does_not_start(
    hosts: Network, flags: tuple[str, ...], told: str
) -> None:
    """Before anything is loaded, with the address to give."""
    here, there = hosts.hosts
    nats = f"nats://{there.address}:{NATS_PORT}"
    words = ("engine", "vllm", "--role", "prefill", "--nats", nats, "--model", str(tiny_model.ensure()))
    code, output = await here.finish(*words, *flags)
    assert code != 0
    assert told in output
    assert flags or f"Give {here.address}, from which NATS is reached" in output
