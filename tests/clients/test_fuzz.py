"""No request makes the edge fail: bodies from published API documents and from our own, with odd values in them."""

from pathlib import Path
from typing import Any

import pytest

from tests.clients.fuzzing import Report, own, published, send
from tests.support.processes.fleet import FleetProcess

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.xdist_group("clients")]

REQUESTS = 400
MANY = 20_000
WARM_UP = 4_000
GROWTH_MIB_MAX = 48.0


async def test_no_request_of_a_published_document_makes_the_edge_fail(up: FleetProcess) -> None:
    report = await send(up.url, published(), REQUESTS, seed=1)
    check(report)
    assert any(status == 200 for _, status in report.answers), report.answers
    assert any(status == 400 for _, status in report.answers), report.answers


async def test_no_request_of_our_document_makes_the_edge_fail(up: FleetProcess) -> None:
    operations = own(await document(up))
    assert {"/v1/chat/completions", "/v1/messages"} <= {each.path for each in operations}
    check(await send(up.url, operations, REQUESTS, seed=2))


@pytest.mark.soak
@pytest.mark.timeout(3_600)
async def test_twenty_thousand_requests_leave_no_memory_behind(up: FleetProcess) -> None:
    operations = [*published(), *own(await document(up))]
    check(await send(up.url, operations, WARM_UP, seed=3))
    before = edge_mib(up)
    check(await send(up.url, operations, MANY, seed=4))
    grown = edge_mib(up) - before
    print(f"edge: {before:.0f} MiB before, {grown:+.1f} MiB after {MANY} requests")
    assert grown < GROWTH_MIB_MAX


async def document(up: FleetProcess) -> Any:
    """Our own OpenAPI document."""
    async with up.client() as client:
        return (await client.get("/openapi.json")).json()


def check(report: Report) -> None:
    """No failures; the first few in full."""
    shown = "\n".join(
        f"{fault.path}: {fault.what}\n    {fault.body[:1500]!r}" for fault in report.failures[:5]
    )
    assert not report.failures, f"{len(report.failures)} of {report.answers.total()} failed:\n{shown}"


def edge_mib(up: FleetProcess) -> float:
    """Memory of the edge that is its own."""
    total = 0
    for pid in up.pids("headwater edge"):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private"))
    assert total, "the edge's process"
    return total / 1024
