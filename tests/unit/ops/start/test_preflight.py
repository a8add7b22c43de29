"""Before an engine starts it is compared with the fleet that runs: over tables as the actors have them."""

import msgspec
import pytest

from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.engine import EngineUnavailable
from headwater.engines.launcher import PortRange
from headwater.ops.config.processes import EngineProcess, with_settings
from headwater.ops.config.worker import WorkerSettings
from headwater.ops.start import plan
from headwater.schemas import subjects
from headwater.schemas.tables import Lease
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.memory import memory_world
from tests.unit.engines.vllm.test_checks import card


@pytest.mark.parametrize("live", [True, False])
async def test_cards_count_while_a_worker_lives(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    """A pool that nobody serves any more holds nobody back, and an adapter's card is none of a pool."""
    monkeypatch.setattr("headwater.engines.vllm.config.installed", lambda: "0.32.0")
    monkeypatch.setattr("headwater.engines.vllm.config.on_cpu", lambda: True)
    world = memory_world(ManualClock())
    present = card(block_size=64, version="0.1")
    await world.cards.put(subjects.card_key(present.pool), msgspec.json.encode(present))
    await world.cards.put(f"{present.pool}.lora.x", b"{}")
    if live:
        lease = Lease(kind="worker", name="w", pool=present.pool)
        await world.leases.put("worker.w", msgspec.json.encode(lease))
    edge = Lease(kind="edge", name="e", pool=present.pool)
    await world.leases.put("edge.e", msgspec.json.encode(edge))
    asked = EngineProcess(worker=WorkerSettings(profile=WorkerProfile("prefill")))
    if not live:
        await plan.against_fleet(world, asked, "m")
        return
    with pytest.raises(EngineUnavailable, match="--block-size 32: worker w of pool m-b64"):
        await plan.against_fleet(world, asked, "m")
    same = asked._replace(worker=asked.worker._replace(block_size=64))
    with pytest.raises(EngineUnavailable, match=r"--role prefill: vLLM .* here, 0\.1 in pool m-b64"):
        await plan.against_fleet(world, same, "m")
    mixed = with_settings(same, {"worker.allow": ("mixed-versions",)})
    await plan.against_fleet(world, mixed, "m")
    # On a GPU only the engine knows its block size; it is the version that is left to compare.
    monkeypatch.setattr("headwater.engines.vllm.config.on_cpu", lambda: False)
    await plan.against_fleet(world, EngineProcess(), "m")
    sglang = with_settings(
        EngineProcess(worker=WorkerSettings("sglang")), {"sglang.native": ("--page-size", "32")}
    )
    with pytest.raises(EngineUnavailable, match="--block-size 32: worker w of pool m-b64"):
        await plan.against_fleet(world, sglang, "m")


@pytest.mark.parametrize(
    ("values", "cpu", "wanted"),
    [
        ({"worker.engine": "sim"}, False, 16),
        ({}, True, 32),
        ({}, False, 0),
        ({"vllm.native": ("--block-size", "128")}, False, 128),
        ({"worker.engine": "sglang"}, True, 0),
    ],
)
def test_the_block_size_that_is_compared_is_the_one_that_the_engine_will_take(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, object], cpu: bool, wanted: int
) -> None:
    monkeypatch.setattr("headwater.engines.vllm.config.on_cpu", lambda: cpu)
    settings = with_settings(EngineProcess(), values)
    assert plan.launcher_for(settings).known_block_size(plan.spec_of(settings, "w")) == wanted


async def test_an_empty_fleet_is_fine() -> None:
    """The first worker of all."""
    decode = EngineProcess(worker=WorkerSettings(profile=WorkerProfile("decode")))
    await plan.against_fleet(memory_world(ManualClock()), decode, "m")


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        (
            "worker.handoff_port",
            9100,
            "--metrics-port 9100: worker-0 would use port 9100, which worker-0 uses",
        ),
        ("worker.handoff_port", 9101, "--metrics-port 9101: worker-1 .*, which worker-0 uses"),
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
        plan.check_plan(settings, plan.plan(settings))


@pytest.mark.parametrize(
    ("first", "size", "mend"),
    [(80, 1, "65535"), (65535, 2, "65534"), (1023, 4, "65532"), (70000, 1, "65535")],
)
def test_ports_outside_what_can_be_used(first: int, size: int, mend: str) -> None:
    """The flag, the ports, and the highest that would do."""
    with pytest.raises(
        EngineUnavailable, match=rf"--handoff-port {first}: prefill-0 .*1024 to 65535.*up to {mend}$"
    ):
        plan.check_ports([PortRange("--handoff-port", "prefill-0", first, size)])


def test_ports_at_the_edges_and_side_by_side_are_fine() -> None:
    """No port twice, and none outside."""
    plan.check_ports(
        [
            PortRange("--handoff-port", "a", 1024, 2),
            PortRange("--handoff-port", "b", 1026, 2),
            PortRange("--metrics-port", "b", 65535),
        ]
    )


def test_ports_of_two_owners_may_not_overlap() -> None:
    """Both owners, both flags, and how far to move."""
    with pytest.raises(EngineUnavailable) as caught:
        plan.check_ports([PortRange("--metrics-port", "b", 5601), PortRange("--handoff-port", "a", 5600, 4)])
    for text in (
        "--metrics-port 5601",
        "b would use port 5601",
        "which a uses",
        "--handoff-port 5600",
        "by 3 or",
    ):
        assert text in str(caught.value)
