"""llm-comply's checks of the OpenAI chat API, of Open Responses and of the Anthropic API, against the scripted fleet.

They run under a model name that the suite takes for one that reasons; otherwise it skips those checks.
"""

import asyncio
import sys

import msgspec
import pytest

from tests.support.processes.fleet import FleetProcess

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.xdist_group("clients")]

RUNS = {
    "openai-chat": ("gpt-5-scripted", 9),
    "open-responses": ("gpt-5-scripted", 13),
    "anthropic": ("claude-opus-scripted", 9),
}

_UNKNOWN = {f"unknown SSE event type: response.reasoning_text.{end}" for end in ("delta", "done")}
OTHER_NAMES = {"streaming-response": _UNKNOWN, "streaming-usage": _UNKNOWN}
"""The suite knows reasoning as `response.reasoning.delta`, Open Responses' name for what OpenAI's own clients, which are
served, know as `response.reasoning_text.delta`. Streams of a model that does not reason pass."""


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
    others_names = OTHER_NAMES if suite == "open-responses" else {}
    assert passed == set(results) - set(others_names), results
    for name, errors in others_names.items():
        assert set(results[name]["errors"]) <= errors, results[name]
