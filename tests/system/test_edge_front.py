"""An edge that faces clients: TLS, no probes on its own port, rate limits and CORS, as `headwater up` starts it."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.support.processes.fleet import FleetProcess, fleet

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

ORIGIN = "https://chat.example"
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a certificate and its key."""
    folder = tmp_path_factory.mktemp("front")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=edge"
    files = ("-keyout", "tls.key", "-out", "tls.pem", "-days", "2")
    subprocess.run([*command.split(), *files], cwd=folder, check=True, capture_output=True)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(folder: Path) -> AsyncIterator[FleetProcess]:
    """A fleet whose edge has all of it."""
    tls = ("--tls-cert", str(folder / "tls.pem"), "--tls-key", str(folder / "tls.key"))
    limits = ("--limit", "requests_per_minute=3,tokens_per_minute=1000")
    flags = ("--engine", "sim", "--no-probes", "--cors-origins", ORIGIN)
    async with fleet(folder, *flags, *tls, *limits) as up:
        yield up


async def test_requests_over_tls_are_limited(front: FleetProcess) -> None:
    """The fourth of three a minute is refused, and a page of the listed origin can read why."""
    async with front.client() as client:
        answers = [
            await client.post("/v1/chat/completions", json=CHAT, headers={"origin": ORIGIN}) for _ in range(4)
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "3"
    assert answers[0].headers["x-ratelimit-limit-tokens"] == "1000"
    assert 1 <= int(answers[3].headers["retry-after"]) <= 20
    assert all(answer.headers["access-control-allow-origin"] == ORIGIN for answer in answers)


async def test_probes_are_on_the_metrics_port_only(front: FleetProcess) -> None:
    """Of each process; the edge's tells which models are served."""
    targets = json.loads(Path(front.log.parent, "data", "prometheus-targets.json").read_text())
    ports = {group["labels"]["name"]: group["targets"][0] for group in targets}
    async with front.client() as client, httpx.AsyncClient() as plain:
        for path in ("/live", "/health", "/metrics"):
            assert (await client.get(path)).status_code == 404
            assert (await plain.get(f"http://{ports['edge-0']}{path}")).status_code == 200
        health = (await plain.get(f"http://{ports['edge-0']}/health")).json()
        assert health["status"] == "ok"
        assert health["workers"]["sim"] >= 1
        # `up` is ready once the edge is; the router's probes may still tell what was before it answered.
        router = f"http://{ports['router-0']}/health"
        async with asyncio.timeout(20):
            while (await plain.get(router)).json() != {"status": "ok"}:
                await asyncio.sleep(0.1)
