"""The folder of an engine's metrics: one per life, gone afterwards, whoever died."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.engines import process as engine_process

PROGRAM = """
import json, os, sys
from headwater.engines import process as private_folder
from headwater.ops.start import metrics_folder
metrics_folder.take()
# Prometheus is imported once, before the fork, as the host of several engines does it.
from prometheus_client import Counter
from headwater.ops.start.metrics import Labelled
counter = Counter("steps", "Steps", ["engine"])

def values():
    labels = {"worker": "w", "pool": "p", "role": "prefill", "rank": "0"}
    return {
        (family.name, *sorted(sample.labels.items())): sample.value
        for family in Labelled(lambda: labels).collect()
        for sample in family.samples
        if sample.name == "steps_total"
    }

def life():
    with metrics_folder.per_life() as folder:
        counter.labels("1").inc(2)
        if not os.fork():
            # A process of the engine, as vLLM's core.
            counter.labels("1").inc(3)
            os._exit(0)
        os.wait()
        print(json.dumps([str(folder), [[list(key), value] for key, value in values().items()]]), flush=True)

for _ in range(2):
    if not os.fork():
        life()
        os._exit(0)
    os.wait()
counter.labels("0").inc()
print(json.dumps([os.environ[metrics_folder.VARIABLE], [[list(k), v] for k, v in values().items()]]), flush=True)
private_folder.give_up_own()
"""


def run(program: str, folder: Path) -> subprocess.Popen[str]:
    """A Python program whose temporary files lie in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )


def test_each_life_counts_its_own_processes_and_leaves_nothing(tmp_path: Path) -> None:
    """Two workers forked from one host: neither sees the other's numbers, both those of their own processes."""
    process = run(PROGRAM, tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    one, two, host = (json.loads(line) for line in output.splitlines())
    assert len({one[0], two[0], host[0]}) == 3
    for _, values in (one, two):
        labels = ["engine", "1"], ["pool", "p"], ["rank", "1"], ["role", "prefill"], ["worker", "w"]
        assert values == [[["steps", *labels], 5.0]]
    assert [value for _, value in host[1]] == [1.0]
    assert list(next(tmp_path.iterdir()).iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a living one's is not."""
    program = "from headwater.ops.start import metrics_folder as m\nprint(m.take(), flush=True)\ninput()"
    processes = [run(program.replace("input()", "import signal; signal.pause()"), tmp_path) for _ in range(2)]
    folders = []
    for process in processes:
        assert process.stdout is not None
        folders.append(Path(process.stdout.readline().strip()))
    dead, alive = processes
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    base = folders[0].parent
    assert engine_process.remove_leftovers(base) == [folders[0].name]
    assert [folder.exists() for folder in folders] == [False, True]
    alive.kill()
    alive.wait()
    assert engine_process.remove_leftovers(base) == [folders[1].name]
    for process in processes:
        process.communicate()
