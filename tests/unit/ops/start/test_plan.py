"""Which workers a machine runs (names, roles, ports, GPUs), and what is checked before an engine starts."""

import socket
from typing import Any

import msgspec
import pytest

from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.engine import EngineUnavailable
from headwater.engines.launcher import PortRange, visible_gpus
from headwater.events.jetstream import connection
from headwater.ops.commands.serve import checked
from headwater.ops.config.processes import (
    EngineProcess,
    added_engines,
    process_words,
    with_engine_options,
    with_settings,
)
from headwater.ops.config.setting import ConfigError
from headwater.ops.config.worker import EmbeddingOptions, FleetSettings, WorkerSettings
from headwater.ops.start import plan as workers
from headwater.ops.start.sockets import free_range
from headwater.schemas import subjects
from headwater.schemas.tables import Lease
from tests.support.processes.line import settings_of
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.memory import memory_world
from tests.unit.engines.vllm.test_checks import card


def made(values: dict[str, Any]) -> EngineProcess:
    """Settings of an engine process that differ from the defaults, by key."""
    return with_settings(EngineProcess(), values)


def gpus(*words: str) -> int:
    """GPUs of one worker of vLLM with these arguments."""
    return workers.launcher_for(made({"vllm.native": words})).gpus()


def test_two_workers_without_a_role_are_the_default() -> None:
    """And none beside workers with one."""
    assert workers.names(made({})) == [("worker-0", "both"), ("worker-1", "both")]
    assert workers.names(made({"fleet.workers": 1, "name": "a"})) == [("a", "both")]
    assert workers.names(made({"name": "a"})) == [("a-0", "both"), ("a-1", "both")]
    assert workers.names(made({"name": "a", "fleet.prefill_workers": 1, "fleet.decode_workers": 1})) == [
        ("a-prefill-0", "prefill"),
        ("a-decode-0", "decode"),
    ]
    assert workers.names(made({"fleet.prefill_workers": 1, "fleet.decode_workers": 2})) == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
    ]
    assert workers.names(made({"fleet.workers": 1, "fleet.decode_workers": 1})) == [
        ("worker-0", "both"),
        ("decode-0", "decode"),
    ]
    assert workers.names(made({"worker.role": "prefill", "fleet.workers": 2})) == [
        ("prefill-0", "prefill"),
        ("prefill-1", "prefill"),
    ]


HERE = "127.0.0.1"
ELSEWHERE = "nats://203.0.113.7:4222"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"nats.url": ELSEWHERE}, "--handoff-host is missing: NATS is on another machine.*Give 192.0.2.1"),
        ({"nats.url": f"{ELSEWHERE},nats://{HERE}:4222"}, ""),
        ({"nats.url": ELSEWHERE, "worker.handoff_host": HERE}, ""),
        ({"nats.url": ELSEWHERE, "worker.role": "both"}, ""),
        ({"worker.handoff_host": "0.0.0.0"}, "--handoff-host 0.0.0.0: other workers are told this address"),
        (
            {"worker.handoff_host": "203.0.113.8"},
            "--handoff-host 203.0.113.8: it is no address of this machine",
        ),
        ({}, ""),
        (
            {"worker.engine": "sglang", "worker.role": "decode", "nats.url": ELSEWHERE},
            "--handoff-host is missing.*from a decode worker",
        ),
        ({"worker.engine": "sim", "nats.url": ELSEWHERE}, ""),
    ],
)
def test_an_address_that_workers_elsewhere_cannot_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], told: str
) -> None:
    """With the one to give; a fleet on one machine needs none."""
    monkeypatch.setattr(
        connection, "own_address_towards", lambda host, _: "" if host == HERE else "192.0.2.1"
    )
    settings = made({"fleet.workers": 1, "worker.role": "prefill"} | values)
    if told:
        with pytest.raises(EngineUnavailable, match=told):
            workers.plan(settings)
    else:
        assert len(workers.plan(settings)) == 1


def test_sglang_workers_come_after_the_others() -> None:
    """With an engine, ports and GPUs of their own."""
    settings = made(
        {
            "fleet.workers": 1,
            "fleet.sglang_workers": 2,
            "metrics.port": 9100,
            "vllm.native": ("-tp", "2"),
            "sglang.native": ("--tp-size", "1", "--dp-size=2"),
        }
    )
    found = workers.plan(settings, devices="abcdef")
    assert [(one.name, one.engine, one.metrics_port, one.gpus[:2]) for one in found] == [
        ("worker-0", "vllm", 9100, ("a", "b")),
        ("sglang-0", "sglang", 9101, ("c", "d")),
        ("sglang-1", "sglang", 9102, ("e", "f")),
    ]
    with pytest.raises(ConfigError, match="3 workers with 2 GPUs each need 6, and 5 are visible"):
        workers.plan(settings, devices="abcde")
    own = workers.of_worker(settings, found[1])
    assert (own.worker.engine, own.name, added_engines(own.fleet)) == ("sglang", "sglang-0", {})
    assert workers.names(own) == [("sglang-0", "both")]


def test_a_role_for_all_excludes_workers_with_their_own() -> None:
    """Two places would say different things."""
    with pytest.raises(ConfigError, match=r"--role prefill .*leave it out"):
        workers.names(made({"worker.role": "prefill", "fleet.decode_workers": 1}))


def test_ports_are_counted_up_per_worker_and_rank() -> None:
    """Side channels by rank, metrics by worker."""
    settings = made(
        {
            "fleet.prefill_workers": 1,
            "fleet.decode_workers": 2,
            "worker.handoff_port": 5600,
            "metrics.port": 9100,
            "vllm.native": ("--data-parallel-size", "2"),
        }
    )
    plan = workers.plan(settings)
    assert [worker.side_port for worker in plan] == [5600, 5602, 5604]
    assert [worker.metrics_port for worker in plan] == [9100, 9101, 9102]
    one = workers.of_worker(settings, plan[1])
    assert (one.name, one.worker.profile.role, one.worker.handoff_port, one.metrics.port, one.fleet) == (
        "decode-0",
        "decode",
        5602,
        9101,
        FleetSettings(1),
    )
    assert workers.names(one) == [("decode-0", "decode")]


def test_a_worker_is_told_the_format_of_embeddings_that_the_settings_name() -> None:
    """Its lease and its events have it: see the tests of an incarnation."""
    profile = workers.profile_of(made({"worker.embeddings": EmbeddingOptions(format="qwen2-vl")}), "encode-0")
    assert (profile.instance, profile.embedding_format) == ("encode-0", "qwen2-vl")


@pytest.mark.parametrize(
    ("values", "who"),
    [
        ({"worker.engine": "sglang", "worker.role": "decode"}, "sglang workers with role decode"),
        ({"worker.engine": "sglang", "worker.role": "encode"}, "sglang workers with role encode"),
        ({"worker.engine": "sglang"}, "sglang workers with role both"),
        ({}, "vllm workers with role both"),
        # Of the engine's own arguments only the connector counts.
        (
            {
                "vllm.native": (
                    "--kv-transfer-config",
                    '{"kv_connector": "LMCache"}',
                    "--hf-config-path",
                    "/nixl",
                )
            },
            "vllm workers with role both",
        ),
        ({"fleet.encode_workers": 1}, "vllm workers with role encode"),
        ({"worker.role": "prefill", "vllm.connector": "none"}, "vllm workers with role prefill"),
    ],
)
def test_a_port_for_handoffs_that_no_worker_uses_is_refused(values: dict[str, Any], who: str) -> None:
    """Whatever the engine and the role; an address is too, unless one of them fetches by it."""
    port = made({"worker.handoff_port": 8998, **values})
    with pytest.raises(EngineUnavailable, match=f"--handoff-port 8998 is not used by .*{who}: leave it out"):
        workers.check_handoff_settings(port, workers.plan(port))
    host = made({"worker.handoff_host": HERE, **values})
    if "sglang workers with role decode" in who:
        workers.check_handoff_settings(host, workers.plan(host))
        return
    with pytest.raises(EngineUnavailable, match=f"--handoff-host {HERE} is not used by .*{who}"):
        workers.check_handoff_settings(host, workers.plan(host))


@pytest.mark.parametrize(
    ("values", "port_of_decode"),
    [({"worker.engine": "sglang"}, 0), ({"worker.engine": "vllm"}, 8999)],
)
def test_a_process_gets_the_settings_of_handoffs_that_its_own_worker_uses(
    values: dict[str, Any], port_of_decode: int
) -> None:
    """What another worker of the fleet uses would be refused there."""
    roles = {"fleet.workers": 1, "fleet.prefill_workers": 1, "fleet.decode_workers": 1}
    fleet = made({"worker.handoff_port": 8998, "worker.handoff_host": HERE, **roles, **values})
    found = {}
    for worker in workers.plan(fleet):
        own = workers.of_worker(fleet, worker)
        workers.check_handoff_settings(own, workers.plan(own))
        found[worker.role] = (own.worker.handoff_host, own.worker.handoff_port)
    assert found == {"both": ("", 0), "prefill": (HERE, 8998), "decode": (HERE, port_of_decode)}


def test_prefill_workers_of_sglang_have_ports_of_their_own() -> None:
    """Their bootstrap servers are on one machine; a worker that only decodes has none."""
    values = {"worker.engine": "sglang", "worker.handoff_port": 8998, "fleet.prefill_workers": 2}
    assert [one.side_port for one in workers.plan(made(values))] == [8998, 8999]
    decodes = {"worker.engine": "sglang", "worker.handoff_port": 8998, "worker.role": "decode"}
    assert {one.side_port for one in workers.plan(made(decodes))} == {0}


def test_a_worker_gets_no_setting_that_only_others_of_its_fleet_use() -> None:
    """It would refuse it. What it does use reaches its engine's options."""
    common = {
        "worker.gpus_per_worker": 2,
        "worker.allow": ("vulnerable",),
        "worker.logits_processors": {"a": "b:c"},
    }
    settings = made({"worker.engine": "sim", "fleet.sglang_workers": 1, **common})
    own, added = (
        workers.apart(settings._replace(worker=settings.worker._replace(engine=name)))[0]
        for name in ("sim", "sglang")
    )
    assert own.worker == EngineProcess().worker._replace(engine="sim")
    assert (added.worker.gpus_per_worker, added.worker.allow) == (2, ("vulnerable",))
    options = workers.launcher_for(added).options
    assert (options.gpus_per_worker, options.allow, options.logits_processors) == (
        2,
        ("vulnerable",),
        {"a": "b:c"},
    )
    assert with_engine_options(added, "sglang", options) == added


def test_logits_processors_are_of_one_engine() -> None:
    """Another engine of the same command line could not load the class."""
    values = {"worker.logits_processors": {"a": "b:c"}, "fleet.sglang_workers": 1}
    with pytest.raises(
        ConfigError, match=r"--logits-processors: .* workers of vllm and sglang: give each its own"
    ):
        checked(made({"worker.engine": "vllm", **values}))
    for sound in (made({"worker.engine": "sim", **values}), made({**values, "fleet.sglang_workers": 0})):
        assert checked(sound).worker.logits_processors == {"a": "b:c"}


def test_side_channels_get_free_ports_where_they_are_needed() -> None:
    """A range that nobody holds; none for workers that hand nothing over."""
    assert [worker.side_port for worker in workers.plan(made({}))] == [0, 0]
    assert [
        worker.side_port for worker in workers.plan(made({"worker.engine": "sim", "fleet.decode_workers": 1}))
    ] == [0]
    first, second = (worker.side_port for worker in workers.plan(made({"vllm.connector": "nixl"})))
    assert second == first + 1
    for port in (first, second):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    with pytest.raises(EngineUnavailable, match="give --handoff-port or --metrics-port"):
        free_range(1, "192.0.2.1")


def test_each_worker_sees_all_gpus_its_own_first() -> None:
    """Memory on another worker's GPU can be opened only where that is visible."""
    devices = ("0", "1", "2", "3", "4")
    settings = made({"fleet.prefill_workers": 1, "fleet.decode_workers": 1, "vllm.native": ("-tp", "2")})
    assert [worker.gpus for worker in workers.plan(settings, devices=devices)] == [
        ("0", "1", "2", "3", "4"),
        ("2", "3", "4", "0", "1"),
    ]
    assert gpus("-tp=2", "--pipeline-parallel-size", "3") == 6
    # As vLLM counts: context parallelism of the prefill has GPUs of its own, that of the decode has not.
    context = ("--prefill-context-parallel-size", "2", "--decode-context-parallel-size", "2")
    assert gpus("-tp=2", *context) == 4
    own = made({"fleet.workers": 2, "worker.gpus_per_worker": 3})
    with pytest.raises(
        ConfigError, match=r"2 workers with 3 GPUs each need 6, and 5 are visible: .*--gpus-per-worker"
    ):
        workers.plan(own, devices=devices)


def test_gpus_of_tensorrt_llm_follow_from_its_arguments() -> None:
    """Tensor, pipeline and context parallelism; experts and attention ranks are spread over the same GPUs."""
    spread = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "moe_expert_parallel_size": 2,
        "enable_attention_dp": True,
    }
    settings = made({"worker.engine": "tensorrt_llm", "fleet.workers": 2, "tensorrt_llm.overrides": spread})
    devices = tuple(map(str, range(8)))
    found = workers.plan(settings, devices=devices)
    assert [plan.gpus[:4] for plan in found] == [devices[:4], devices[4:]], "its own first"
    with pytest.raises((ConfigError, EngineUnavailable), match="8"):
        workers.plan(settings, devices=devices[:7])


def test_the_users_choice_of_gpus_is_the_machine() -> None:
    """In the user's order."""
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-x"}) == ("3", "GPU-x")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_a_process_that_hosts_all_plans_the_same() -> None:
    """The flags that it gets mean the same as the plan of `up`."""
    native = ("--max-num-seqs", "8 9")
    settings = made(
        {
            "fleet.prefill_workers": 1,
            "fleet.decode_workers": 2,
            "worker.handoff_port": 5600,
            "metrics.port": 9100,
            "vllm.connector": "nixl,offload",
            "vllm.connector_options": {"offload": {"cpu_bytes_to_use": 5}},
            "worker.tier": "gold",
            "worker.taints": ("batch", "spot"),
        }
    )
    hosted = settings_of("engine", *process_words(settings), "--", *native)
    assert workers.plan(hosted) == workers.plan(settings)
    assert hosted == with_settings(settings, {"vllm.native": native})
    assert (
        workers.of_worker(hosted, workers.plan(hosted)[0]).worker.profile.taints
        == settings.worker.profile.taints
    )
    for worker in workers.plan(settings):
        alone = settings_of("engine", *process_words(workers.of_worker(settings, worker)))
        assert workers.plan(workers.of_worker(alone, worker)) == [worker._replace(gpus=())]


def test_ranks_of_sglang_that_share_attention_share_gpus() -> None:
    """`--tp-size 8 --dp-size 8 --enable-dp-attention` are 8 GPUs, and 64 without the last."""
    words = ("--tp-size", "8", "--dp-size", "8")
    devices = tuple(map(str, range(64)))
    for native, count in ((words, 64), ((*words, "--enable-dp-attention"), 8)):
        settings = made({"worker.engine": "sglang", "fleet.workers": 1, "sglang.native": native})
        (worker,) = workers.plan(settings, devices=devices)
        with pytest.raises(ConfigError, match=f"{count} GPUs each"):
            workers.plan(settings, devices=devices[: count - 1])
        del worker


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
        await workers.against_fleet(world, asked, "m")
        return
    with pytest.raises(EngineUnavailable, match="--block-size 32: worker w of pool m-b64"):
        await workers.against_fleet(world, asked, "m")
    same = asked._replace(worker=asked.worker._replace(block_size=64))
    with pytest.raises(EngineUnavailable, match=r"--role prefill: vLLM .* here, 0\.1 in pool m-b64"):
        await workers.against_fleet(world, same, "m")
    mixed = with_settings(same, {"worker.allow": ("mixed-versions",)})
    await workers.against_fleet(world, mixed, "m")
    # On a GPU only the engine knows its block size; it is the version that is left to compare.
    monkeypatch.setattr("headwater.engines.vllm.config.on_cpu", lambda: False)
    await workers.against_fleet(world, EngineProcess(), "m")
    sglang = with_settings(
        EngineProcess(worker=WorkerSettings("sglang")), {"sglang.native": ("--page-size", "32")}
    )
    with pytest.raises(EngineUnavailable, match="--block-size 32: worker w of pool m-b64"):
        await workers.against_fleet(world, sglang, "m")


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
    assert workers.launcher_for(settings).known_block_size(workers.spec_of(settings, "w")) == wanted


async def test_an_empty_fleet_is_fine() -> None:
    """The first worker of all."""
    decode = EngineProcess(worker=WorkerSettings(profile=WorkerProfile("decode")))
    await workers.against_fleet(memory_world(ManualClock()), decode, "m")


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
        workers.check_plan(settings, workers.plan(settings))


@pytest.mark.parametrize(
    ("first", "size", "mend"),
    [(80, 1, "65535"), (65535, 2, "65534"), (1023, 4, "65532"), (70000, 1, "65535")],
)
def test_ports_outside_what_can_be_used(first: int, size: int, mend: str) -> None:
    """The flag, the ports, and the highest that would do."""
    with pytest.raises(
        EngineUnavailable, match=rf"--handoff-port {first}: prefill-0 .*1024 to 65535.*up to {mend}$"
    ):
        workers.check_ports([PortRange("--handoff-port", "prefill-0", first, size)])


def test_ports_at_the_edges_and_side_by_side_are_fine() -> None:
    """No port twice, and none outside."""
    workers.check_ports(
        [
            PortRange("--handoff-port", "a", 1024, 2),
            PortRange("--handoff-port", "b", 1026, 2),
            PortRange("--metrics-port", "b", 65535),
        ]
    )


def test_ports_of_two_owners_may_not_overlap() -> None:
    """Both owners, both flags, and how far to move."""
    with pytest.raises(EngineUnavailable) as caught:
        workers.check_ports(
            [PortRange("--metrics-port", "b", 5601), PortRange("--handoff-port", "a", 5600, 4)]
        )
    for text in (
        "--metrics-port 5601",
        "b would use port 5601",
        "which a uses",
        "--handoff-port 5600",
        "by 3 or",
    ):
        assert text in str(caught.value)
