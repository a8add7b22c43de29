"""A fleet's file: what it means for each host, and what is wrong with one."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from headwater.ops.config.setting import ConfigError
from headwater.ops.launch import run
from headwater.ops.launch.fleet_file import LOCAL, parse_fleet, read_fleet, with_addresses
from headwater.ops.launch.hosts import plan_host, wanted_workers
from headwater.ops.start.machine import MachinePlan

EXAMPLES = sorted((Path(__file__).parents[4] / "deploy" / "fleets").rglob("*.toml"))

ONE = """
[pools.alpha]
[[pools.alpha.workers]]
engine = "sim"
count = 2
"""

THREE = """
[hosts.a]
address = "10.0.0.1"
ssh = "ops@a"
[hosts.b]
address = "10.0.0.2"
[hosts.c]
address = "10.0.0.3"
[nats]
hosts = ["a", "b", "c"]
keys_dir = "keys"
[edges]
count = 2
hosts = ["b", "c"]
[pools.alpha]
routers.hosts = ["a"]
[[pools.alpha.workers]]
engine = "sim"
role = "prefill"
hosts = ["a"]
[[pools.alpha.workers]]
engine = "sim"
role = "decode"
hosts = ["b", "c"]
count = 3
"""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_fleet_that_can_be_planned(path: Path) -> None:
    fleet = read_fleet(path)
    plans = [plan_host(fleet, host, remote=True) for host in fleet.host_names]
    names = Counter(name for one in plans for name in _names(one))
    assert all(number == 1 for name, number in names.items())
    assert sum(len(one.edges) for one in plans) >= 1
    routed = {router.for_model for one in plans for router in one.routers}
    assert routed == set(fleet.pools)
    assert run.describe(fleet)


def _names(plan: MachinePlan) -> list[str]:
    kinds = ("edges", "routers", "engines", "followers")
    found = [process for kind in kinds for process in getattr(plan, kind)]
    # A follower has the name of the worker that it is a part of.
    return [one.name for one in found if one not in plan.followers]


def test_processes_are_numbered_over_all_hosts() -> None:
    fleet = parse_fleet(THREE, "fleet.toml")
    plans = {host: plan_host(fleet, host, remote=True) for host in fleet.host_names}
    assert [one.name for one in plans["a"].edges] == []
    assert [one.name for one in plans["b"].edges] == ["edge-0", "edge-1"]
    assert [one.name for one in plans["c"].edges] == ["edge-2", "edge-3"]
    assert [one.name for one in plans["a"].routers] == ["router-0"]
    assert [one.name for one in plans["b"].engines] == ["decode-b"]
    assert [one.name for one in plans["c"].engines] == ["decode-c"]
    assert plans["b"].engines[0].fleet.workers == 3
    assert wanted_workers(fleet) == 7
    # The host's own server first.
    assert plans["b"].nats.url.split(",")[0] == "nats://10.0.0.2:4222"
    assert plans["b"].streams.replicas == 3
    assert plans["a"].console is not None
    assert plans["b"].console is None
    assert {one.data_dir for one in plans.values()} == {
        "headwater-data/a",
        "headwater-data/b",
        "headwater-data/c",
    }


def test_a_worker_over_several_hosts_has_one_leader() -> None:
    text = (
        THREE
        + '[[pools.alpha.workers]]\nengine = "sglang"\nname = "big"\nnodes = 3\nsettings.worker.block_size = 16\n'
    )
    fleet = parse_fleet(text, "fleet.toml")
    leader, second = (plan_host(fleet, host, remote=True) for host in ("a", "b"))
    assert [one.name for one in leader.followers] == []
    led = next(one for one in leader.engines if one.name == "big-0")
    assert led.engines.sglang.native[:2] == ("--nnodes", "3")
    (follower,) = second.followers
    words = follower.engines.sglang.native
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--dist-init-addr") + 1] == "10.0.0.1:29500"
    assert wanted_workers(fleet) == 8


def test_settings_reach_the_processes_that_have_them() -> None:
    text = """
[settings]
log.format = "json"
router.policy = "round_robin"
[edges]
settings.http.port = 8123
[pools.alpha]
settings.worker.block_size = 32
[[pools.alpha.workers]]
engine = "sim"
settings.worker.max_model_len = 4096
[[pools.alpha.workers]]
engine = "sim"
name = "other"
"""
    plan = plan_host(parse_fleet(text, "fleet.toml"), LOCAL)
    assert plan.log.format == "json"
    assert plan.routers[0].router.policy == "round_robin"
    assert plan.edges[0].http.port == 8123
    assert [one.worker.block_size for one in plan.engines] == [32, 32]
    assert [one.worker.max_model_len for one in plan.engines] == [4096, 0]
    assert [one.name for one in plan.engines] == ["worker", "other"]


def test_a_table_of_an_inner_level_changes_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that is a table is joined over the levels of the file by the names in it, which may be references."""
    text = """
[settings.http.limits]
connections_max = 100
[settings.health]
stuck_s = 77
[edges.settings.http.limits]
body_bytes_max = { env = "FLEET_BODY" }
[pools.alpha.settings.health]
idle_s = 5
[[pools.alpha.workers]]
engine = "sim"
settings.health.canary_s = 3
"""
    fleet = parse_fleet(text, "fleet.toml")
    monkeypatch.setenv("FLEET_BODY", "20000")
    plan = plan_host(fleet, LOCAL)
    limits = plan.edges[0].http
    assert (limits.limits.connections.connections, limits.limits.bodies.bytes_max) == (100, 20000)
    health = plan.engines[0].health
    assert (health.stuck_s, health.idle_s, health.canary_s) == (77, 5, 3)


def test_references_are_resolved_where_they_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("ghost\n")
    text = f"""
[nats]
url = {{ env = "FLEET_NATS" }}
settings.nats.nkey_file = {{ file = "{tmp_path / "token"}" }}
{ONE}"""
    fleet = parse_fleet(text, "fleet.toml")
    monkeypatch.setenv("FLEET_NATS", "nats://user:secret@example:4222")
    plan = plan_host(fleet, LOCAL)
    assert plan.nats.url == "nats://user:secret@example:4222"
    assert plan.nats.nkey_file == "ghost"
    assert plan.server is None
    assert "secret" not in run.describe(fleet)
    monkeypatch.delenv("FLEET_NATS")
    with pytest.raises(ConfigError, match=r"nats\.url: the variable FLEET_NATS is not set"):
        plan_host(fleet, LOCAL)


def test_addresses_may_be_given_later() -> None:
    fleet = with_addresses(parse_fleet(THREE, "fleet.toml"), ["a=node1", "b=node2", "c=node3"])
    assert (
        plan_host(fleet, "c", remote=True).nats.url == "nats://node3:4222,nats://node1:4222,nats://node2:4222"
    )
    with pytest.raises(ConfigError, match="the fleet's file has the hosts a, b, c"):
        with_addresses(fleet, ["d=node4"])


WRONG = {
    "": r"pools: a fleet needs a model|missing required field `pools`",
    "[pools.a]": r"pools.*: object missing required field `workers`",
    "[pools.a]\nworkers = []": r"pools\.a\.workers: there are none",
    ONE + "cout = 3": r"unknown field `cout`",
    ONE + 'role = "decoder"': r"role: invalid enum value 'decoder'",
    ONE.replace("count = 2", "count = 0"): r"count: expected `int` >= 1",
    ONE + 'hosts = ["x"]': r"pools\.alpha\.workers\[0\]\.hosts: there is no host x; the file has local",
    ONE
    + "settings.worker.block_sice = 3": r"workers\[0\]\.settings: unknown setting worker\.block_sice; did you mean worker\.block_size\?",
    ONE + 'settings.worker.block_size = "many"': r"workers\[0\]\.settings\.worker\.block_size = many: ",
    ONE + 'settings.worker.engine = "vllm"': r"worker\.engine: follows from the rest of the file",
    ONE
    + "settings.http.port = 1": r"workers\[0\]\.settings\.http\.port: these processes have no such setting",
    ONE + 'arguments = ["--x"]': r"arguments: the engine sim has no arguments of its own",
    ONE.replace('"sim"', '"vllmm"'): r"there is no engine 'vllmm': did you mean vllm\?",
    ONE + "nodes = 2": r"nodes: 1 hosts cannot be divided into groups of 2",
    ONE + "[edges]\ncount = 0": r"edges\.count: a fleet needs an edge",
    ONE + "[pools.alpha.routers]\ncount = 0": r"routers\.count: a pool needs a router",
    ONE + '[nats]\nurl = "nats://a"\nhosts = ["local"]': r"nats: give either `url`",
    THREE.replace(
        'keys_dir = "keys"', ""
    ): r"nats\.keys_dir: .*nats-config --out keys --servers 3 --hosts 10\.0\.0\.1,10\.0\.0\.2,10\.0\.0\.3`",
    THREE.replace("10.0.0.2", "10.0.0.1"): r"hosts: two have the address 10\.0\.0\.1",
    THREE.replace(
        'hosts = ["a", "b", "c"]', 'hosts = ["a", "b"]'
    ): r"nats\.hosts: 2 servers; a cluster has three or five",
    ONE
    + 'name = "x"\n[[pools.alpha.workers]]\nengine = "sim"\nname = "x"': r"workers\[1\]\.name: x is the name of other workers, too",
    ONE + "settings.nats.creds_file = {}": r"a reference is|expected|creds_file",
    "a = [": r"fleet\.toml: ",
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_a_wrong_file_says_what_is_wrong(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        _plan(text)
    assert re.search(WRONG[text], str(raised.value)), str(raised.value)


def _plan(text: str) -> None:
    fleet = parse_fleet(text, "fleet.toml")
    for host in fleet.host_names:
        plan_host(fleet, host, remote=True)


def test_the_page_names_every_key_of_the_file() -> None:
    """The guide's table against the types."""
    import msgspec

    from headwater.ops.launch import fleet_file

    page = (Path(__file__).parents[4] / "docs" / "guides" / "fleet-files.md").read_text()
    for kind in (
        fleet_file.Host,
        fleet_file.Servers,
        fleet_file.Processes,
        fleet_file.Workers,
        fleet_file.PoolOfModel,
    ):
        for field in msgspec.structs.fields(kind):
            assert f"`{field.name}`" in page, f"{kind.__name__}.{field.name}"
    for example in EXAMPLES:
        assert example.stem in page
        assert tomllib.loads(example.read_text())
