"""A fleet on addresses of IPv6."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.fleet import fleet


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


pytestmark = [pytest.mark.processes, pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here")]

BODY: dict[str, Any] = {"model": "sim", "prompt": "Where does a river begin?", "max_tokens": 4}


async def test_a_fleet_on_ipv6(tmp_path: Path) -> None:
    """It finds ports, is ready, and every URL and target that it tells can be used as it is."""
    flags = ("--engine", "sim", "--workers", "1", "--host", "::1", "--metrics-host", "::1")
    async with fleet(tmp_path, *flags) as up, up.client() as client:
        assert up.url.startswith("http://[::1]:")
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        groups = json.loads((tmp_path / "data" / "prometheus-targets.json").read_text())
        targets = [target for group in groups for target in group["targets"]]
        assert len(targets) == 3
        for target in targets:
            assert (await client.get(f"http://{target}/live")).status_code == 200
