"""Models that cannot be served: one line within a bounded time, before an engine is started."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.engines import model_folder, tiny_model
from tests.support.processes.commands import Ended, ended

FREE = ("--port", "0", "--nats-port", "0")
SOAK = pytest.mark.soak

ENDLESS = {
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}x",
    "range": "{% for a in range(10000000000) %}x{% endfor %}",
    "text": "{% set n = namespace(t='x') %}{% for a in range(30) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "power": "{{ 9 ** (9 ** 9) }}",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model without weights."""
    folder = tmp_path / "tiny-river"
    model_folder.make(folder)
    return folder


async def _up(
    tmp_path: Path, model: Path, *flags: str, engine: str = "vllm", within_s: float, forked: bool = False
) -> Ended:
    data = str(tmp_path / "data")
    words = ("--engine", engine, "--model", str(model), "--data-dir", data, *FREE)
    return await ended("up", *words, *flags, within_s=within_s, vllm=forked)


@pytest.mark.processes
@pytest.mark.parametrize(
    "missing", ["weights", *(pytest.param(name, marks=SOAK) for name in ("tokenizer.json", "config.json"))]
)
async def test_a_model_without_one_of_its_files(tmp_path: Path, model: Path, missing: str) -> None:
    """Found before an engine is started: one line that names the folder and what it has not."""
    if missing != "weights":
        (model / "model.safetensors").write_bytes(b"")
        (model / missing).unlink()
    line = (await _up(tmp_path, model, within_s=20)).told()
    assert str(model) in line
    assert (missing if missing != "weights" else "safetensors") in line


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        *(pytest.param(name, marks=SOAK) for name in ("config.json", "tokenizer_config.json")),
    ],
)
async def test_a_model_with_a_damaged_file(tmp_path: Path, model: Path, name: str) -> None:
    """Half of a JSON file: one line that names it, also with the simulated engine."""
    (model / "model.safetensors").write_bytes(b"")
    text = (model / name).read_text()
    (model / name).write_text(text[: len(text) // 2])
    line = (await _up(tmp_path, model, engine="sim", within_s=20)).told()
    assert str(model / name) in line


@pytest.mark.processes
async def test_truncated_weights(tmp_path: Path, model: Path) -> None:
    """The file is shorter than its own header says: found without an engine, in one line, without a restart."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 2000)
    line = (await _up(tmp_path, model, within_s=40)).told()
    assert "model.safetensors" in line


@pytest.mark.soak
@pytest.mark.vllm
@pytest.mark.xdist_group("vllm")
@pytest.mark.timeout(200)
async def test_weights_that_do_not_fit_the_configuration(tmp_path: Path) -> None:
    """Only vLLM finds it, and prints its own traceback: it is not started again, and `up` ends and says why."""
    model = tmp_path / "tiny-wrong"
    shutil.copytree(tiny_model.ensure(), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": 128, "head_dim": 64}))
    done = await _up(
        tmp_path,
        model,
        "--workers",
        "1",
        "--native=--kv-cache-memory-bytes=67108864",
        within_s=150,
        forked=True,
    )
    assert done.code == 1, done.output
    assert done.output.count('"event": "vllm_importing"') == 1, "it was started again"
    assert f"vLLM cannot start with {model}" in done.output
    [line] = [line for line in done.output.splitlines() if line.startswith("headwater: ")]
    assert "cannot start" in line


@pytest.mark.processes
@pytest.mark.parametrize(
    "kind",
    # "power" exceeds the bound of time in one operation that nothing but a signal ends, "text" that of memory.
    [pytest.param(kind, marks=() if kind == "power" else SOAK) for kind in sorted(ENDLESS)],
)
async def test_a_template_that_does_not_end(tmp_path: Path, kind: str) -> None:
    """Tried within bounds before anything is started: one line that names the template, and what to do."""
    model = tmp_path / "tiny-river"
    model_folder.make(model, template=ENDLESS[kind])
    line = (await _up(tmp_path, model, engine="sim", within_s=40)).told()
    assert "chat template" in line
    assert str(model) in line
    assert "--chat-template" in line
