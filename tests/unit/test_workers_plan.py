"""Which workers a machine runs: names, roles, ports, GPUs."""

import socket

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.ops import worker_flags, workers
from headwater.ops.config import ConfigError, Settings


def test_two_workers_without_a_role_are_the_default() -> None:
    """And none beside workers with one."""
    assert workers.names(Settings()) == [("worker-0", "both"), ("worker-1", "both")]
    assert workers.names(Settings(workers=1, name="a")) == [("a", "both")]
    assert workers.names(Settings(prefill_workers=1, decode_workers=2)) == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
    ]
    assert workers.names(Settings(workers=1, decode_workers=1)) == [
        ("worker-0", "both"),
        ("decode-0", "decode"),
    ]
    assert workers.names(Settings(role="prefill", workers=2)) == [
        ("prefill-0", "prefill"),
        ("prefill-1", "prefill"),
    ]


def test_a_role_for_all_excludes_workers_with_their_own() -> None:
    """Two places would say different things."""
    with pytest.raises(ConfigError, match=r"--role prefill .*leave it out"):
        workers.names(Settings(role="prefill", decode_workers=1))


def test_ports_are_counted_up_per_worker_and_rank() -> None:
    """Side channels by rank, metrics by worker."""
    settings = Settings(
        prefill_workers=1,
        decode_workers=2,
        nixl_port=5600,
        metrics_port=9100,
        native=("--data-parallel-size", "2"),
    )
    plan = workers.plan(settings)
    assert [worker.nixl_port for worker in plan] == [5600, 5602, 5604]
    assert [worker.metrics_port for worker in plan] == [9100, 9101, 9102]
    one = workers.of_worker(settings, plan[1])
    assert (one.name, one.role, one.nixl_port, one.metrics_port, one.workers, one.decode_workers) == (
        "decode-0",
        "decode",
        5602,
        9101,
        1,
        0,
    )
    assert workers.names(one) == [("decode-0", "decode")]


def test_side_channels_get_free_ports_where_they_are_needed() -> None:
    """A range that nobody holds; none for workers that hand nothing over."""
    assert [worker.nixl_port for worker in workers.plan(Settings())] == [0, 0]
    assert [worker.nixl_port for worker in workers.plan(Settings(engine="sim", decode_workers=1))] == [0]
    first, second = (worker.nixl_port for worker in workers.plan(Settings(connector="nixl")))
    assert second == first + 1
    for port in (first, second):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    with pytest.raises(EngineUnavailable, match="give --nixl-port or --metrics-port"):
        workers.free_range(1, "192.0.2.1")


def test_each_worker_sees_all_gpus_its_own_first() -> None:
    """Memory on another worker's GPU can be opened only where that is visible."""
    devices = ("0", "1", "2", "3", "4")
    settings = Settings(prefill_workers=1, decode_workers=1, native=("-tp", "2"))
    assert [worker.gpus for worker in workers.plan(settings, devices=devices)] == [
        ("0", "1", "2", "3", "4"),
        ("2", "3", "4", "0", "1"),
    ]
    assert workers.gpus_needed(Settings(native=("-tp=2", "--pipeline-parallel-size", "3"))) == 6
    own = Settings(workers=2, gpus_per_worker=3)
    with pytest.raises(
        ConfigError, match=r"2 workers with 3 GPUs each need 6, and 5 are visible: .*--gpus-per-worker"
    ):
        workers.plan(own, devices=devices)


def test_the_users_choice_of_gpus_is_the_machine() -> None:
    """In the user's order."""
    assert workers.visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-x"}) == ("3", "GPU-x")
    assert workers.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_a_process_that_hosts_all_plans_the_same() -> None:
    """The flags that it gets say the same as the plan of `up`."""
    from headwater.ops import cli, config

    settings = Settings(
        prefill_workers=1,
        decode_workers=2,
        nixl_port=5600,
        metrics_port=9100,
        connector="nixl,offload",
        connector_options={"offload": {"cpu_bytes_to_use": 5}},
        native=("--max-num-seqs", "8 9"),
        tier="gold",
        taint=("batch", "spot"),
    )
    words = [
        "engine",
        *worker_flags.common(settings),
        *worker_flags.together(settings),
        "--",
        *settings.native,
    ]
    ours, behind = cli._split(words)
    flags = cli.parser().parse_args(ours)
    flags.behind = behind
    hosted = config.resolve(flags, {})
    assert workers.plan(hosted) == workers.plan(settings)
    assert (hosted.native, hosted.connector_options) == (settings.native, settings.connector_options)
    assert (hosted.tier, hosted.taint) == (settings.tier, settings.taint)
    assert workers.of_worker(hosted, workers.plan(hosted)[0]).taint == settings.taint
    for worker in workers.plan(settings):
        flags = cli.parser().parse_args(["engine", *worker_flags.of(worker)])
        alone = config.resolve(flags, {})
        found = workers.plan(workers.of_worker(alone, worker))[0]
        assert found == worker._replace(gpus=())
