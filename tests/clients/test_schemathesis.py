"""schemathesis on our OpenAPI document: no 5xx, nothing undocumented, and what the document forbids is refused."""

import asyncio
import re
from pathlib import Path

import msgspec
import pytest

from tests.clients.conftest import MODEL
from tests.clients.environments import CLIENTS
from tests.support.processes.fleet import FleetProcess

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.xdist_group("clients"),
    pytest.mark.soak,
    pytest.mark.timeout(900),
]

SECONDS = 300
REQUESTS_MIN = 1_000

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "negative_data_rejection"),
    *("unsupported_method", "allow_header_conformance"),
)


async def test_schemathesis_finds_nothing(up: FleetProcess, tmp_path: Path) -> None:
    """The document is ours, but that it names the model: with made-up names every request would be a 404."""
    async with up.client() as client:
        document = (await client.get("/openapi.json")).json()
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": MODEL}
    path = tmp_path / "openapi.json"
    path.write_bytes(msgspec.json.encode(document))
    process = await asyncio.create_subprocess_exec(
        str(CLIENTS / "python" / "bin" / "schemathesis"),
        *("run", str(path), "--url", up.url, "--checks", ",".join(CHECKS)),
        *("--max-time", str(SECONDS), "--request-timeout", "30", "--continue-on-failure", "--seed", "1"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=tmp_path,
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output[-20_000:]
    generated = re.search(r"(\d+) generated", output)
    assert generated is not None, output
    print(f"schemathesis: {generated[1]} requests")
    assert int(generated[1]) > REQUESTS_MIN
