"""The boards are those that their queries make, and `headwater monitoring` writes everything that Prometheus reads."""

import json
import subprocess
import sys
from pathlib import Path

import yaml

from headwater.ops.monitoring.files import write_files
from tests.docs.pages import ROOT
from tests.support.servers.prometheus import program


def test_the_boards_are_current() -> None:
    """In a process of its own: the tests of this process register metrics."""
    done = subprocess.run(
        [sys.executable, "-m", "docs._boards", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_prometheus_accepts_what_is_written(tmp_path: Path) -> None:
    """A folder with a name that YAML would read as something else, and targets beside those of the file."""
    data = tmp_path / 'a "fleet": #1'
    data.mkdir()
    (data / "prometheus-targets.json").write_text("[]")
    written = write_files(tmp_path / "out" / "deep", data, 7, ["10.0.0.1:9100", "[::1]:9101"])
    assert {path.name for path in written} >= {"alerts.yaml", "prometheus.yml", "fleet.json"}
    config = next(path for path in written if path.name == "prometheus.yml")
    done = subprocess.run(
        [program("promtool"), "check", "config", str(config)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [job] = yaml.safe_load(config.read_text())["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == [str(data / "prometheus-targets.json")]
    assert job["static_configs"] == [{"targets": ["10.0.0.1:9100", "[::1]:9101"]}]
    for path in written:
        if path.suffix == ".json":
            assert json.loads(path.read_text())["uid"] == f"headwater-{path.stem}"
