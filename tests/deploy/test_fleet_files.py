"""A fleet's file as values of the chart, which real Helm renders, and as a job of Slurm, which shellcheck reads."""

import subprocess
from pathlib import Path

import pytest

from headwater.ops.config.setting import ConfigError
from headwater.ops.launch import kubernetes, slurm
from headwater.ops.launch.fleet_file import parse_fleet, read_fleet
from tests.deploy.rendered import DEPLOY, TOOLS, pod_templates, template

FLEETS = sorted((DEPLOY / "fleets").rglob("*.toml"))
NOT_SERVED = {"diffusion"}
"""An example with an engine that the chart has no image of."""


@pytest.mark.parametrize(
    "path", [path for path in FLEETS if path.stem not in NOT_SERVED], ids=lambda path: path.stem
)
def test_helm_renders_every_example(path: Path) -> None:
    fleet = read_fleet(path)
    objects = template(text=kubernetes.render(fleet))
    wanted = sum(
        one.count * len(one.hosts or fleet.host_names)
        for pool in fleet.pools.values()
        for one in pool.workers
    )
    assert _workers(objects) == wanted
    commands = " ".join(
        word
        for _, pod in pod_templates(objects)
        for container in pod["spec"]["containers"]
        for word in map(str, [*container.get("command", []), *container.get("args", [])])
    )
    for name, pool in fleet.pools.items():
        assert name in commands
        for workers in pool.workers:
            for word in workers.arguments:
                assert word in commands, word


def _workers(objects: list[dict[str, object]]) -> int:
    """The pods of engines, all nodes of a worker counted."""
    total = 0
    for one, pod in pod_templates(objects):
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] in (
            "decode",
            "prefill",
            "encode",
            "worker",
        ):
            spec = one["spec"]
            group = spec.get("leaderWorkerTemplate", {}).get("size")
            # A group has a template for its leader and one for the others.
            total += spec["replicas"] * (1 if not group else group / 2)
    return round(total)


ONE = '[pools.sim]\n[[pools.sim.workers]]\nengine = "sim"\n'

REFUSED = {
    ONE + '[[pools.sim.workers]]\nengine = "vllm"\n': "the chart gives a model one engine",
    ONE + '[[pools.sim.workers]]\nengine = "sim"\n': "one group of decode workers",
    ONE.replace("[pools.sim]", '[pools.sim]\nmodel = "/models/a/b"'): "a folder of a machine",
    '[nats]\nurl = { env = "X" }\n' + ONE: "nats.url is a reference",
}


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_what_the_chart_does_not_have_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[text]):
        kubernetes.render(parse_fleet(text, "fleet.toml"))


def test_a_job_has_no_faults_that_shellcheck_knows() -> None:
    path = DEPLOY / "fleets" / "multi-node.toml"
    options = slurm.SlurmOptions(container="image", mounts="/data:/data", more=("--exclusive",))
    script = slurm.render(read_fleet(path), path.read_text(), options)
    program = str(TOOLS / "python" / "bin" / "shellcheck")
    done = subprocess.run([program, "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
