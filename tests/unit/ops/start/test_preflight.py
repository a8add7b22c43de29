"""Before an engine starts it is compared with the fleet that runs: over tables as the actors have them."""

import msgspec
import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.ops.config.processes import EngineProcess, with_settings
from headwater.ops.config.worker import WorkerSettings
from headwater.ops.start import plan, preflight
from headwater.schemas import subjects
from headwater.schemas.tables import Lease
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.memory import memory_world
from tests.unit.engines.vllm.test_checks import card


@pytest.mark.parametrize("live", [True, False])
async def test_cards_count_while_a_worker_lives(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    """A pool that nobody serves any more holds nobody back, and an adapter's card is none of a pool."""
    monkeypatch.setattr("headwater.engines.vllm.config.installed", lambda: "0.32.0")
    world = memory_world(ManualClock())
    present = card(block_size=64, version="0.1")
    await world.cards.put(subjects.card_key(present.pool), msgspec.json.encode(present))
    await world.cards.put(f"{present.pool}.lora.x", b"{}")
    if live:
        lease = Lease(kind="worker", name="w", pool=present.pool)
        await world.leases.put("worker.w", msgspec.json.encode(lease))
    edge = Lease(kind="edge", name="e", pool=present.pool)
    await world.leases.put("edge.e", msgspec.json.encode(edge))
    asked = EngineProcess(worker=WorkerSettings(role="prefill"))
    if not live:
        await preflight.against_fleet(world, asked, "m", cpu=True)
        return
    with pytest.raises(EngineUnavailable, match="--block-size 32: worker w of pool m-b64"):
        await preflight.against_fleet(world, asked, "m", cpu=True)
    same = asked._replace(worker=asked.worker._replace(block_size=64))
    with pytest.raises(EngineUnavailable, match=r"--role prefill: vLLM .* here, 0\.1 in pool m-b64"):
        await preflight.against_fleet(world, same, "m", cpu=True)
    mixed = with_settings(same, {"vllm.allow_mixed_versions": True})
    await preflight.against_fleet(world, mixed, "m", cpu=True)
    # On a GPU only the engine knows its block size; it is the version that is left to compare.
    await preflight.against_fleet(world, EngineProcess(), "m", cpu=False)
    sglang = with_settings(
        EngineProcess(worker=WorkerSettings("sglang")), {"sglang.native": ("--page-size", "32")}
    )
    with pytest.raises(EngineUnavailable, match="--block-size 32: worker w of pool m-b64"):
        await preflight.against_fleet(world, sglang, "m", cpu=False)


def test_a_fleet_with_nothing_in_it_holds_nobody_back() -> None:
    """The block size that is compared is the one that the engine will take."""
    assert preflight.known_block_size(EngineProcess(worker=WorkerSettings(engine="sim")), cpu=False) == 16
    assert preflight.known_block_size(EngineProcess(), cpu=True) == 32
    assert preflight.known_block_size(EngineProcess(), cpu=False) == 0
    native = with_settings(EngineProcess(), {"vllm.native": ("--block-size", "128")})
    assert preflight.known_block_size(native, cpu=False) == 128
    assert preflight.known_block_size(EngineProcess(worker=WorkerSettings("sglang")), cpu=True) == 0


async def test_an_empty_fleet_is_fine() -> None:
    """The first worker of all."""
    decode = EngineProcess(worker=WorkerSettings(role="decode"))
    await preflight.against_fleet(memory_world(ManualClock()), decode, "m", cpu=True)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("vllm.nixl_port", 9100, "--metrics-port 9100: worker-0 would use port 9100, which worker-0 uses"),
        ("vllm.nixl_port", 9101, "--metrics-port 9101: worker-1 .*, which worker-0 uses"),
        (
            "vllm.native",
            ('--kv-events-config={"endpoint": "tcp://*:9000"}',),
            "worker-1 would use port 9000, which worker-0",
        ),
        ("vllm.native", ("--kv-events-config", "{"), "--kv-events-config {: .*JSON object"),
        (
            "vllm.native",
            ('--kv-events-config={"endpoint": "tcp://*:80"}',),
            "--kv-events-config 80: .*1024 to 65535",
        ),
    ],
)
def test_ports_of_all_kinds_are_looked_at_together(key: str, value: object, wanted: str) -> None:
    """Side channels, metrics and KV events of all the workers of a machine."""
    own = {"metrics.port": 9100, "vllm.connector": "nixl", key: value}
    settings = with_settings(EngineProcess(), own)
    with pytest.raises(EngineUnavailable, match=wanted):
        preflight.check(settings, plan.plan(settings))
