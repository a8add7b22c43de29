"""The streams of a whole fleet, as real processes made them."""

from pathlib import Path

import msgspec
import pytest

from tests.support.processes.fleet import fleet

pytestmark = [pytest.mark.processes]


async def test_the_streams_of_a_running_fleet_are_as_wanted(tmp_path: Path) -> None:
    """Nothing is missing or differs, and the pool is found."""
    async with fleet(tmp_path, "--engine", "sim", "--workers", "1") as up:
        code, output = await up.command("streams", "--json")
        assert code == 0, output
        document = msgspec.json.decode(output)
        assert document["whole"]
        assert {one["what"] for one in document["streams"]} == {
            "pool log",
            "request log",
            "leases",
            "model cards",
            "API keys",
            "secrets",
            "stored responses",
            "video jobs",
            "objects",
        }
        assert all(one["differences"] == [] for one in document["streams"])
