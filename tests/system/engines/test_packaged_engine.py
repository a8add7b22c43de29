"""An engine that a package brings, with options of its own: nothing of Headwater knows of it."""

import asyncio
import os
import re
import shutil
import signal
from pathlib import Path

import httpx
import pytest

from headwater.ops.start.children import headwater_command
from tests.support.engines import river_engine

pytestmark = [pytest.mark.processes]


def install(site: Path) -> None:
    """Put the package and its line of entry points where Python looks for both."""
    package = Path(river_engine.__file__).parent
    shutil.copytree(package, site / package.name)
    info = site / "river-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: river\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headwater.engines]\nriver = river_engine.engine:River\n")


async def run(site: Path, *words: str, **variables: str) -> asyncio.subprocess.Process:
    """Start a `headwater` in whose environment the package is installed."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return await asyncio.create_subprocess_exec(
        *headwater_command(*words),
        env={**os.environ, "PYTHONPATH": path, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )


async def test_options_of_an_installed_engine_are_settings_like_any_other(tmp_path: Path) -> None:
    """Of a flag, a variable and a file, each reaches the engine; the reference and help have them."""
    install(tmp_path / "site")
    file = tmp_path / "headwater.toml"
    file.write_text('[river]\nmouth = "a lake"\n')
    flags = ("--engine", "river", "--workers", "1", "--river-source", "a glacier", "--config", str(file))
    ports = ("--port", "0", "--nats-port", "0", "--console-port", "0", "--data-dir", str(tmp_path / "data"))
    up = await run(tmp_path / "site", "up", *flags, *ports, HEADWATER_RIVER_STONES="7")
    reference = await run(tmp_path / "site", "config", "reference")
    assert up.stdout is not None
    try:
        text = (await reference.communicate())[0].decode()
        _, _, section = text.partition("## River\n")
        row = "| `river.stones` | `--river-stones` | `HEADWATER_RIVER_STONES` | `N` | `0` | stones that it passes |"
        assert row in section.partition("\n## ")[0].splitlines()
        async for line in up.stdout:
            if ready := re.search(r"ready at (http://\S+)/v1", line.decode()):
                break
        else:
            pytest.fail("it did not start")
        async with httpx.AsyncClient(base_url=ready[1]) as client:
            body = {"model": "river", "prompt": "Where?", "max_tokens": 100}
            answer = await client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == "from a glacier past 7 stones to a lake", answer.text
    finally:
        if up.returncode is None:
            up.send_signal(signal.SIGTERM)
        await up.communicate()
