"""Every process of `headwater up` has a metrics page of its own, and Prometheus is told where they are."""

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headwater.ops.start.sockets import free_range
from tests.support.processes.commands import ended
from tests.support.processes.fleet import fleet

pytestmark = [pytest.mark.processes]

BODY: dict[str, Any] = {"model": "sim", "prompt": "Where does a river begin? " * 20, "max_tokens": 4}


@pytest.mark.parametrize("given", [pytest.param("no port", marks=pytest.mark.soak), "a port"])
async def test_each_process_exports_its_own_metrics(tmp_path: Path, given: str) -> None:
    """The file in Prometheus's format names each once; behind each target are numbers of that process."""
    first = free_range(4, "127.0.0.1")
    flags = ["--engine", "sim", *(["--metrics-port", str(first)] if given == "a port" else [])]
    async with fleet(tmp_path, *flags) as up, up.client() as client:
        for _ in range(3):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        groups = json.loads((tmp_path / "data" / "prometheus-targets.json").read_text())
        found = {
            (group["labels"]["component"], group["labels"]["name"]): target
            for group in groups
            for target in group["targets"]
        }
        assert {group["labels"]["job"] for group in groups} == {"headwater"}
        assert set(found) == {
            ("edge", "edge-0"),
            ("router", "router-0"),
            ("worker", "worker-0"),
            ("worker", "worker-1"),
        }
        assert len(set(found.values())) == len(found)
        if given == "a port":
            assert f"127.0.0.1:{first}" in found.values()
        pages = {key: await _numbers(client, target) for key, target in found.items()}
    assert pages["edge", "edge-0"]["headwater_edge_requests_total"] == 3
    assert pages["router", "router-0"]["headwater_router_decisions_total"] == 3
    assert pages["router", "router-0"]["headwater_router_workers"] == 2
    workers = [pages["worker", name] for name in ("worker-0", "worker-1")]
    for page in pages.values():
        assert page["process_resident_memory_bytes"] > 0
    kinds = {"edge", "router", "worker", "shadow"}
    for (kind, _), page in pages.items():
        others = [
            name for name in page if name.split("_")[1] in kinds - {kind} and name.startswith("headwater_")
        ]
        # Zeros of others would be among what is counted and averaged.
        assert not others
    for page in workers:
        assert any(name.startswith("headwater_worker_") for name in page)
    counted = {
        name
        for page in workers
        for name, value in page.items()
        if name.startswith("headwater_worker_") and value
    }
    assert counted, "three answers moved no number of any worker"


async def _numbers(client: httpx.AsyncClient, target: str) -> dict[str, float]:
    """A page's samples, summed over their labels."""
    answer = await client.get(f"http://{target}/metrics")
    assert answer.status_code == 200
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


@pytest.mark.soak
async def test_the_file_is_made_anew(tmp_path: Path) -> None:
    """A later fleet with fewer workers leaves no targets of the earlier one."""
    targets = tmp_path / "data" / "prometheus-targets.json"
    async with fleet(tmp_path, "--engine", "sim"):
        before = targets.read_text()
    async with fleet(tmp_path, "--engine", "sim", "--workers", "1"):
        names = {group["labels"]["name"] for group in json.loads(targets.read_text())}
    assert "worker-1" in before
    assert names == {"edge-0", "router-0", "worker-0"}


async def test_a_taken_metrics_port(tmp_path: Path) -> None:
    """One line that names the flag, before anything is started."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        data = str(tmp_path / "data")
        flags = ("--engine", "sim", "--port", "0", "--nats-port", "0", "--data-dir", data)
        line = (await ended("up", *flags, "--metrics-port", port, within_s=20)).told()
    assert "--metrics-port" in line
    assert port in line
