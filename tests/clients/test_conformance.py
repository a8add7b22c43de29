"""llm-comply's checks of the OpenAI chat and the Anthropic API, against the scripted fleet.

They run under a model name that the suite takes for one that reasons; otherwise it skips those checks.
"""

import asyncio
import sys

import msgspec
import pytest

from tests.support.processes.fleet import FleetProcess

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.xdist_group("clients")]

RUNS = {"openai-chat": ("gpt-5-scripted", 9), "anthropic": ("claude-opus-scripted", 9)}

TEXT_ONLY = {"chat-image-input", "anth-image-input"}
"""Checks that need a model which takes images; this one takes text, and says so."""


@pytest.mark.parametrize("suite", RUNS)
async def test_the_suite_passes(up: FleetProcess, suite: str) -> None:
    model, count = RUNS[suite]
    arguments = (
        "--format",
        suite,
        "-u",
        f"{up.url}/v1",
        "-k",
        "none",
        "-m",
        model,
        "--json",
        "--timeout",
        "30",
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import sys; from llm_comply.cli import main; sys.exit(main())", *arguments),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    results = {result["id"]: result for result in msgspec.json.decode(output)["results"]}
    assert len(results) == count
    passed = {name for name, result in results.items() if result["status"] == "passed"}
    assert passed == set(results) - TEXT_ONLY, results
    for name in TEXT_ONLY & set(results):
        assert "HTTP 400" in str(results[name]["errors"]), results[name]
