"""How each agent is started, and how it runs commands."""

import os
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.agents.task import PROMPT, Call

ROOT: Final = Path(__file__).parents[2] / ".agents"
BIN: Final = ROOT / "node_modules" / ".bin"


class Agent(NamedTuple):
    """`command` runs the task without a terminal; `model` is the name that it asks for."""

    name: str
    model: str
    call: Call
    command: tuple[str, ...]


def _codex(command: str) -> tuple[str, dict[str, Any]]:
    return "exec_command", {"cmd": command}


def _claude(command: str) -> tuple[str, dict[str, Any]]:
    return "Bash", {"command": command, "description": "Runs a command"}


CODEX: Final = Agent(
    "codex",
    "gpt-5",
    _codex,
    (
        str(BIN / "codex"),
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        PROMPT,
    ),
)
CLAUDE: Final = Agent(
    "claude",
    "claude-sonnet-4-5",
    _claude,
    (str(BIN / "claude"), "--model", "claude-sonnet-4-5", "--allowedTools", "Bash", "-p", PROMPT),
)
AGENTS: Final = (CODEX, CLAUDE)


def environment(home: Path, url: str) -> dict[str, str]:
    """An environment in which both find the fleet, and nothing of the user's."""
    config = home / ".codex" / "config.toml"
    config.parent.mkdir(parents=True)
    provider = (
        f'[model_providers.headwater]\nname = "headwater"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    config.write_text(f'model = "{CODEX.model}"\nmodel_provider = "headwater"\n{provider}')
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
