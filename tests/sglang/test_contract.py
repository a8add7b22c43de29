"""The contract suite over the real SGLang, in its own environment: in a fork of a process that has imported it."""

import asyncio
import re
from pathlib import Path

import pytest

from headwater.ops.start.children import child_environment
from tests.support.engines import tiny_model
from tests.support.processes import zygote
from tests.support.sglang.environment import PYTHON, ROOT

pytestmark = [pytest.mark.xdist_group("sglang"), pytest.mark.timeout(500)]

SUITE = ROOT / "tests" / "contract" / "engine"

RUN = "import sys, pytest; sys.exit(int(pytest.main(sys.argv[1:])))"

# What its zygote has imported cannot be rewritten any more; the assertions of tests are.
FLAGS = (
    "-m",
    "sglang",
    "-n0",
    "-q",
    "-p",
    "no:cacheprovider",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)

SKIPPED = {
    "it loses no events, or cannot be told to announce blocks again",
    "sglang has no sleep here",
    "sglang has no seed here",
    "sglang has no allowed_tokens here",
    "the engine does not know bad words",
    "sglang caches the blocks of a step when it has ended",
}
"""Why tests are skipped for SGLang: capabilities that it lacks with these arguments, and no others."""

TESTS_MIN = 69


async def test_sglang_keeps_the_contract(tmp_path: Path) -> None:
    """As every engine: no test fails, and none is skipped but for what SGLang lacks here."""
    assert PYTHON.exists(), "SGLang's environment is missing: make sglang"
    # SGLang's environment lacks the package that the model is made from.
    await asyncio.to_thread(tiny_model.ensure)
    folder = ("--basetemp", str(tmp_path / "run"))
    # Whatever the run of this test was told, its plugins are in another environment.
    environ = {name: value for name, value in child_environment().items() if name != "PYTEST_ADDOPTS"}
    arguments = ("-c", RUN, str(SUITE), *FLAGS, *folder)
    process = await zygote.start(
        *arguments, environ=environ, stdout=zygote.PIPE, stderr=zygote.STDOUT, sglang=True
    )
    async with asyncio.timeout(450):
        output, _ = await process.communicate()
    text = output.decode(errors="replace")
    assert process.returncode == 0, f"{text[:6_000]}\n…\n{text[-3_000:]}"
    [passed] = re.findall(r"(\d+) passed", text)
    assert int(passed) >= TESTS_MIN, text[-1_000:]
    assert set(re.findall(r"^SKIPPED .*?: (.*)$", text, re.MULTILINE)) == SKIPPED, text[-2_000:]
