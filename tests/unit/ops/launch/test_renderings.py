"""A fleet's file as a job of Slurm, as units of systemd and as a Compose file, judged by their own tools and schema.

`compose-spec.json` is the schema of the Compose specification (Apache-2.0), commit 170098ba.
"""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

from headwater.ops.commands.application import main
from headwater.ops.config.setting import ConfigError
from headwater.ops.config.sources import ConfigFile
from headwater.ops.launch import compose, slurm, systemd
from headwater.ops.launch.fleet_file import LOCAL, parse_fleet, read_fleet
from headwater.ops.launch.slurm import SlurmOptions

FLEETS = Path(__file__).parents[4] / "deploy" / "fleets"
EXAMPLES = sorted(FLEETS.rglob("*.toml"))
ON_ONE_MACHINE = [path for path in EXAMPLES if not read_fleet(path).hosts]
PROGRAM = str(Path(sys.executable).with_name("headwater"))

WITH_REFERENCE = """
[nats]
url = { env = "FLEET_NATS" }
[pools.sim]
[[pools.sim.workers]]
engine = "sim"
"""


@pytest.mark.parametrize("path", ON_ONE_MACHINE, ids=lambda path: path.stem)
def test_compose_files_fit_the_specification(path: Path) -> None:
    fleet = read_fleet(path)
    document = yaml.safe_load(compose.render(fleet, registry="registry.example", tag="0.1.0"))
    schema = json.loads(Path(__file__).with_name("compose-spec.json").read_text())
    jsonschema.Draft7Validator(schema).validate(document)
    wanted = sum(one.count for pool in fleet.pools.values() for one in pool.workers)
    commands = [one["command"] for one in document["services"].values()]
    assert sum(one[:2] == ["headwater", "engine"] for one in commands) == wanted
    for name, service in document["services"].items():
        for config in service["configs"]:
            assert config["source"] in document["configs"], name


def test_configurations_in_a_compose_file_are_ours(tmp_path: Path) -> None:
    document = yaml.safe_load(
        compose.render(read_fleet(FLEETS / "disaggregated.toml"), registry="r", tag="t")
    )
    for name, config in document["configs"].items():
        path = tmp_path / f"{name}.toml"
        path.write_text(config["content"].replace("$$", "$"))
        if name != "nats":
            values = ConfigFile(path).values
            assert values["nats.url"] == "nats://nats:4222"


def test_a_reference_is_a_variable_that_compose_demands() -> None:
    document = yaml.safe_load(compose.render(parse_fleet(WITH_REFERENCE, "f"), registry="r", tag="t"))
    assert "nats" not in document["services"]
    for service in document["services"].values():
        assert "depends_on" not in service
        assert service["environment"]["HEADWATER_NATS"].startswith("${FLEET_NATS:?")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd")
@pytest.mark.parametrize(
    "path", [FLEETS / "disaggregated.toml", FLEETS / "kv-routed.toml"], ids=lambda path: path.stem
)
def test_systemd_accepts_the_units(path: Path, tmp_path: Path) -> None:
    assert main(["systemd", "render", str(path), "--out", str(tmp_path), "--program", PROGRAM]) == 0
    folder = tmp_path / "etc/systemd/system"
    units = [
        folder / name
        for name in ("headwater-edge@edge-0.service", "headwater-nats.service", "headwater.target")
    ]
    units[0].symlink_to(folder / "headwater-edge@.service")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, units)],
        capture_output=True,
        text=True,
        check=False,
    )
    # It also names faults of this machine's own units.
    assert "headwater" not in done.stderr, done.stderr
    for config in (tmp_path / "etc/headwater").glob("*.toml"):
        assert ConfigFile(config).values.get("name", "pools") == config.stem
    assert "--watch" in (folder / "headwater-pools@pools.service.d/arguments.conf").read_text()
    natives = list(folder.glob("headwater-engine@*.service.d/arguments.conf"))
    wanted = 4 if path.stem == "kv-routed" else 0
    assert len(natives) == wanted
    for one in natives:
        assert "--gpu-memory-utilization 0.9" in one.read_text()


def test_units_leave_references_to_an_administrator() -> None:
    files = systemd.render(parse_fleet(WITH_REFERENCE, "f"), LOCAL, command=PROGRAM)
    text = files["etc/headwater/edge-0.env"]
    assert "FLEET_NATS" in text
    assert text.endswith("HEADWATER_NATS=\n")
    assert "headwater-nats.service" not in files["etc/systemd/system/headwater.target"]


def test_a_job_contains_its_fleet_and_asks_for_its_nodes() -> None:
    text = (FLEETS / "multi-node.toml").read_text()
    script = slurm.render(
        read_fleet(FLEETS / "multi-node.toml"),
        text,
        SlurmOptions(time="2:00:00", container="img", mounts="/a:/a"),
    )
    lines = script.splitlines()
    assert "#SBATCH --nodes=3" in lines
    # Eight workers of one GPU on host c, and tensor parallelism of eight on the others.
    assert "#SBATCH --gpus-per-node=8" in lines
    assert "#SBATCH --time=2:00:00" in lines
    assert "container=(--container-image=img --no-container-mount-home --container-mounts=/a:/a)" in lines
    embedded = script.partition("# ---- fleet.toml\n")[2]
    assert tomllib.loads(
        "\n".join(line.removeprefix("# ") for line in embedded.splitlines())
    ) == tomllib.loads(text)
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_rendered_is_refused() -> None:
    several = read_fleet(FLEETS / "multi-node.toml")
    with pytest.raises(ConfigError, match="compose: runs the fleet of one machine"):
        compose.render(several, registry="r", tag="t")
    with pytest.raises(ConfigError, match="slurm: the file names no hosts"):
        slurm.render(read_fleet(FLEETS / "lora.toml"), "", SlurmOptions())
    with pytest.raises(ConfigError, match="--mounts: these are of a container"):
        slurm.render(several, "", SlurmOptions(mounts="/a:/a"))


def test_images_of_a_compose_file_are_those_that_are_built() -> None:
    """As `deploy/images` names them."""
    bake = json.loads((FLEETS.parent / "images" / "docker-bake.json").read_text())
    built = {tag.partition(":")[0] for target in bake["target"].values() for tag in target["tags"]}
    document = yaml.safe_load(compose.render(read_fleet(FLEETS / "disaggregated.toml"), registry="", tag="t"))
    used = {service["image"] for service in document["services"].values()}
    assert used == {"headwater:t", "headwater-vllm:t"}
    assert {image.partition(":")[0] for image in used} <= built


def test_a_console_that_nobody_could_reach_is_left_out_of_a_compose_file() -> None:
    text = WITH_REFERENCE + "[console]\n"
    left_out = compose.render(parse_fleet(text, "f"), registry="", tag="t")
    assert "# Left out: console-0" in left_out
    assert "console-0" not in yaml.safe_load(left_out)["services"]
    settings = 'settings.console.host = "0.0.0.0"\nsettings.console.token_file = "/tokens"\nsettings.console.port = 9001\n'
    document = yaml.safe_load(compose.render(parse_fleet(text + settings, "f"), registry="", tag="t"))
    assert document["services"]["console-0"]["ports"] == [
        {"target": 9001, "published": "9001", "host_ip": "127.0.0.1"}
    ]
