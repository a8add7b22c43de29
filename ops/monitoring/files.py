"""The files that `headwater monitoring` writes: boards and rules as they are in this package, and Prometheus's configuration for a fleet."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
RULES: Final = "alerts.yaml"
CONFIG: Final = "prometheus.yml"
TARGETS: Final = "prometheus-targets.json"
"""File in a fleet's data directory that lists every process's metrics, as Prometheus's file_sd_configs reads them."""


def write_files(out: Path, data_dir: Path, scrape_s: int, targets: Sequence[str] = ()) -> list[Path]:
    """Write everything into the folder `out`, which is made if it is missing; returns what was written.

    Prometheus reads its targets from the fleet of `data_dir` each `scrape_s` seconds, also those of a fleet that starts later; `targets` are
    further ones, as host and port. Raises `OSError`.
    """
    texts = {f"boards/{path.name}": path.read_text() for path in sorted((FOLDER / "boards").glob("*.json"))}
    texts[RULES] = (FOLDER / RULES).read_text()
    texts[CONFIG] = scrape_config(data_dir.absolute() / TARGETS, scrape_s, targets)
    written = []
    for name, text in texts.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        written.append(path)
    return written


def scrape_config(listed: Path, scrape_s: int, targets: Sequence[str]) -> str:
    """A configuration of Prometheus that scrapes the processes in the file `listed`, and these."""
    static = f"    static_configs:\n      - targets: {json.dumps(list(targets))}\n" if targets else ""
    return f"""\
# Written by `headwater monitoring`.
global:
  scrape_interval: {scrape_s}s
  scrape_timeout: {scrape_s}s
  evaluation_interval: {scrape_s}s
rule_files:
  - {RULES}
scrape_configs:
  - job_name: headwater
    file_sd_configs:
      - files: [{json.dumps(str(listed))}]
        refresh_interval: {scrape_s}s
{static}"""
