"""Clients of other projects: each runs whole conversations with the scripted fleet, in an environment of its own.

`make clients` makes the environments. A program runs all scenarios of an environment, as imports take seconds; here
each of its outcomes is a test.
"""

import asyncio
import base64
import io
import sys
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from headwater.engines.sim import AUDIO_RATE_HZ
from headwater.schemas.media import PromptMedia
from tests.clients.answers import recorded
from tests.clients.conftest import MODEL
from tests.clients.environments import CLIENTS, NODE, PROGRAMS
from tests.support.clients.pictures import picture_file
from tests.support.engines.scripted import shown
from tests.support.media.recordings import tone, wav
from tests.support.processes.fleet import FleetProcess

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.xdist_group("clients"),
    pytest.mark.timeout(300),
]

PICTURE: Final = picture_file(1, size=(56, 28))
SOUND: Final = wav(tone(0.5, AUDIO_RATE_HZ), AUDIO_RATE_HZ)
MEDIA: Final = ("image", "audio", "responses image")
LOOPS: Final = ("tool loop", "tool loop streamed")
CHAT: Final = ("chat", "chat streamed", *LOOPS)
RESPONSES: Final = tuple(f"responses {loop}" for loop in LOOPS)
OPENAI: Final = (*CHAT, "completion", "forced calls", "unknown model", *RESPONSES, *MEDIA)
BOTH: Final = (*LOOPS, *(f"anthropic {loop}" for loop in LOOPS))
ANTHROPIC: Final = (
    *CHAT,
    "thinking",
    "not thinking",
    "forced calls",
    "stop sequence",
    "max tokens",
    "counting",
    "errors",
    "image",
    "image as a tool's result",
)
MEDIA_BOTH: Final = ("image", "audio", "anthropic image")

SCENARIOS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "newest": {"openai": OPENAI, "anthropic": ANTHROPIC},
    "frameworks": {
        "openai": OPENAI,
        "pydantic-ai-slim": (*BOTH, "output type", "anthropic output type"),
        "openai-agents": (*LOOPS, *RESPONSES),
        "instructor": ("named call", "named call streamed", "json schema", "anthropic named call"),
    },
    "slow frameworks": {"litellm": (*BOTH, *MEDIA_BOTH), "langchain-core": (*BOTH, *MEDIA_BOTH)},
    "javascript": {
        "openai": (*CHAT, *RESPONSES, *MEDIA),
        "@anthropic-ai/sdk": (*CHAT, "counting", "unknown model", "image"),
    },
}
"""Environment (or a part of it), package, and what of it is tested."""

SOAK: Final = {name: [pytest.mark.soak] for name in ("frameworks", "slow frameworks")}
"""Importing these takes 15 and 10 s of processor time, and they ask with the SDKs that every run tests, too."""

MODULES: Final = {
    "newest": ("with_openai", "with_anthropic"),
    "frameworks": ("with_openai", "with_pydantic_ai", "with_openai_agents", "with_instructor"),
    "slow frameworks": ("with_litellm", "with_langchain"),
}

RUN_S: Final = 280

CASES: Final = [
    pytest.param(
        *(environment, package, scenario),
        id=f"{environment}-{package}-{scenario}",
        marks=SOAK.get(environment, []),
    )
    for environment, packages in SCENARIOS.items()
    for package, scenarios in packages.items()
    for scenario in scenarios
]


class Outcome(NamedTuple):
    """What came of a scenario; `error` is empty if it succeeded."""

    package: str
    version: str
    scenario: str
    error: str
    seconds: float


def media() -> dict[str, str]:
    """A picture and a sound as files, small enough for a command line, and what the scripted engine answers about them."""
    pixels = np.asarray(Image.open(io.BytesIO(PICTURE)))
    image = PromptMedia("image", "", 0, 1, pixels.shape, pixels.tobytes())
    audio = PromptMedia("audio", "", 0, 1, (AUDIO_RATE_HZ // 2,))
    return {
        "picture": base64.b64encode(PICTURE).decode(),
        "picture_shown": shown([image]),
        "sound": base64.b64encode(SOUND).decode(),
        "sound_shown": shown([audio]),
    }


def task(url: str) -> str:
    """The conversation as JSON: see `Task` in programs/scenarios.py."""
    fixtures = recorded()
    asked, hello = fixtures["parallel-two-calls-thinking"], fixtures["no-call-thinking"]["expected"]
    document = {
        "url": url,
        "model": MODEL,
        "question": "What is the weather in Zürich, and which cafés are open?",
        "calls": asked["expected"]["tool_calls"],
        "results": {"get_weather": "20C", "search": "Café Schober, Café Odeon"},
        "answer": fixtures["multi-turn-final-answer-thinking"]["expected"]["content"],
        "greeting": hello["content"],
        "reasoning": hello["reasoning_content"],
        "tools": asked["tools"],
        **media(),
    }
    return msgspec.json.encode(document).decode()


def command(environment: str, url: str) -> list[str]:
    """The command line that runs all scenarios of an environment."""
    if environment == "javascript":
        return ["node", str(PROGRAMS / "scenarios.mjs"), task(url), str(NODE)]
    python = sys.executable if environment == "newest" else str(CLIENTS / "python" / "bin" / "python")
    return [python, str(PROGRAMS / "scenarios.py"), task(url), *MODULES[environment]]


class Runs:
    """The outcomes of each environment; it runs when the first of them is needed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._tasks: dict[str, asyncio.Task[tuple[list[Outcome], str]]] = {}

    async def outcome(self, environment: str, package: str, scenario: str) -> Outcome:
        """One outcome. Fails if its program ended before it."""
        if environment not in self._tasks:
            self._tasks[environment] = asyncio.create_task(self._run(environment))
        outcomes, errors = await self._tasks[environment]
        found = [one for one in outcomes if (one.package, one.scenario) == (package, scenario)]
        assert found, f"no outcome of {package}, {scenario}:\n{errors}"
        return found[0]

    async def _run(self, environment: str) -> tuple[list[Outcome], str]:
        assert CLIENTS.joinpath(".installed").exists(), "the clients are not installed: run `make clients`"
        pipe = asyncio.subprocess.PIPE
        arguments = command(environment, self._url)
        process = await asyncio.create_subprocess_exec(*arguments, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(RUN_S):
                output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        lines = [line for line in output.splitlines() if line.startswith(b"{")]
        return [Outcome(**msgspec.json.decode(line)) for line in lines], errors.decode()[-4000:]

    async def all(self, environment: str) -> list[Outcome]:
        """All outcomes of an environment."""
        return (await self._tasks[environment])[0]


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def runs(up: FleetProcess) -> AsyncIterator[Runs]:
    """What the environments' programs found."""
    yield Runs(up.url)


@pytest.mark.parametrize(("environment", "package", "scenario"), CASES)
async def test_a_client_completes_its_scenario(
    runs: Runs, environment: str, package: str, scenario: str
) -> None:
    outcome = await runs.outcome(environment, package, scenario)
    assert not outcome.error, outcome.error


@pytest.mark.parametrize("environment", [pytest.param(name, marks=SOAK.get(name, [])) for name in SCENARIOS])
async def test_each_scenario_of_the_programs_is_a_test(runs: Runs, environment: str) -> None:
    first = next(iter(SCENARIOS[environment].items()))
    await runs.outcome(environment, first[0], first[1][0])
    ran = {(one.package, one.scenario) for one in await runs.all(environment)}
    listed = {(name, scenario) for name, each in SCENARIOS[environment].items() for scenario in each}
    assert ran == listed
