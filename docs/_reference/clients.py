"""Clients that tests/clients runs against a fleet, and their versions, from the lock files."""

import json
import re
import tomllib
from pathlib import Path
from typing import Final

from docs._reference.markdown import code, table

ROOT: Final = Path(__file__).resolve().parent.parent.parent
TESTED: Final = ROOT / "tests" / "clients"
_PIN: Final = re.compile(r"^([a-z0-9-]+)==([^ ;\n]+)", re.MULTILINE)

LOCKED: Final = ("openai", "anthropic")
"""The official clients in the project's own environment."""

CONVERSATIONS: Final = {
    "openai": "chat and Responses: whole, streamed, tool loops, forced calls, errors",
    "anthropic": "messages: whole, streamed, tool loops, forced calls, thinking, counting, errors",
    "litellm": "tool loops through its OpenAI and Anthropic providers, whole and streamed",
    "langchain-openai": "tool loops, whole and streamed",
    "langchain-anthropic": "tool loops, whole and streamed",
    "pydantic-ai-slim": "agents with tools, whole and streamed, and typed output, on both APIs",
    "openai-agents": "agents with tools, whole and streamed, on chat and on Responses",
    "instructor": "typed output by named calls and by JSON schema, whole and streamed, on both APIs",
    "@anthropic-ai/sdk": "messages: whole, streamed, tool loops, counting, errors",
}
"""Package, and what of it is tested."""


def page() -> str:
    """The whole page."""
    python, javascript = _pins(), _node()
    rows = [(code(name), _locked(name), "Python", CONVERSATIONS[name]) for name in LOCKED]
    rows += [
        (code(name), python[name], "Python", text) for name, text in CONVERSATIONS.items() if _separate(name)
    ]
    rows += [
        (code(name), version, "JavaScript", CONVERSATIONS[name])
        for name, version in sorted(javascript.items())
    ]
    return "\n\n".join(
        [
            "# Tested clients",
            "Each runs whole conversations with a fleet: a question, parallel tool calls, their results, the answer; OpenAI's and"
            " Anthropic's own in `make test`, the frameworks in `make soak`. See [clients](../guides/clients.md).",
            table(("package", "version", "language", "conversations"), rows),
        ]
    )


def _separate(name: str) -> bool:
    return name != "anthropic" and not name.startswith("@")


def _locked(name: str) -> str:
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    # The lock has several where engines exclude each other; the tests install the newest.
    versions = [str(package["version"]) for package in lock["package"] if package["name"] == name]
    return max(versions, key=lambda version: [int(part) for part in version.split(".")])


def _pins() -> dict[str, str]:
    return dict(_PIN.findall((TESTED / "requirements.txt").read_text()))


def _node() -> dict[str, str]:
    dependencies: dict[str, str] = json.loads((TESTED / "npm" / "package.json").read_text())["dependencies"]
    return dependencies
