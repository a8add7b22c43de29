"""Which workers a machine runs: names, roles, ports, GPUs."""

import socket
from typing import Any

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.engines.launcher import visible_gpus
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
from headwater.ops.config.worker import FleetSettings
from headwater.ops.start import plan as workers
from headwater.ops.start.sockets import free_range
from tests.support.processes.line import settings_of


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
