"""Runs the scenarios of clients in the environment that they are installed in; each outcome is a line of JSON.

python scenarios.py '{"url": …}' with_openai with_litellm …
"""

import asyncio
import importlib
import inspect
import json
import sys
import time
import traceback
from importlib import metadata
from typing import Any, NamedTuple


class Task(NamedTuple):
    """The fleet, and the conversation that a client has with it.

    `picture` is a PNG and `sound` a WAV file in base64; `picture_shown` and `sound_shown` are answers about them.
    """

    url: str
    model: str
    question: str
    calls: list[dict[str, Any]]
    results: dict[str, str]
    answer: str
    greeting: str
    reasoning: str
    tools: list[dict[str, Any]]
    picture: str
    picture_shown: str
    sound: str
    sound_shown: str

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a tool as the client's program would: its name and arguments must be the recorded ones."""
        assert {"name": name, "arguments": arguments} in self.calls, (name, arguments)
        return self.results[name]


def run(module: Any, task: Task) -> None:
    """Run each scenario of a module: `SCENARIOS` of a `PACKAGE`."""
    version = metadata.version(module.PACKAGE)
    for name, scenario in module.SCENARIOS.items():
        began = time.monotonic()
        error = ""
        try:
            outcome = scenario(task)
            if inspect.iscoroutine(outcome):
                asyncio.run(outcome)
        except Exception:
            error = traceback.format_exc()
        outcome = {
            "package": module.PACKAGE,
            "version": version,
            "scenario": name,
            "error": error,
            "seconds": round(time.monotonic() - began, 3),
        }
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    given = Task(**json.loads(sys.argv[1]))
    for argument in sys.argv[2:]:
        run(importlib.import_module(argument), given)
