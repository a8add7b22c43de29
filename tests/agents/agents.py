"""How each agent is started, how it runs commands, and how it finds the fleet."""

import json
import os
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.agents import codex
from tests.agents.task import Calls, one_by_one

ROOT: Final = Path(__file__).parents[2] / os.environ.get("AGENTS", ".agents")
"""Where `make agents` has installed them: the variable is that of the Makefile."""

BIN: Final = ROOT / "node_modules" / ".bin"
AIDER_BIN: Final = ROOT / "python" / "bin" / "aider"
PICTURE: Final = "picture.png"


class Agent(NamedTuple):
    """Commands are without the prompt, which comes last.

    `models` are the names that it asks for. `task` may do everything, and `careful` asks before it does anything (None: it runs no commands).
    `resume` continues the last conversation. `compacted` is a part of the prompt with which it has its conversation summarized.
    `calls` is None for an agent that offers no tools.
    """

    name: str
    models: str
    task: tuple[str, ...]
    resume: tuple[str, ...]
    compacted: str
    calls: Calls | None = None
    careful: tuple[str, ...] | None = None
    refusal: str = ""
    image_prompt: str = "What is it?"
    image_flags: tuple[str, ...] = ()
    interrupts: int = 1


def _claude(command: str) -> tuple[str, dict[str, Any]]:
    return "Bash", {"command": command, "description": "Runs a command"}


def _opencode(command: str) -> tuple[str, dict[str, Any]]:
    return "bash", {"command": command, "description": "Runs a command"}


def _qwen(command: str) -> tuple[str, dict[str, Any]]:
    arguments = {"command": command, "is_background": False, "description": "Runs a command"}
    return "run_shell_command", arguments


_CODEX: Final = (str(BIN / "codex"), "exec", "--skip-git-repo-check")
_CODEX_FREE: Final = (*_CODEX, "--dangerously-bypass-approvals-and-sandbox")
CODEX: Final = Agent(
    name="codex",
    models="gpt-5",
    task=_CODEX_FREE,
    resume=(*_CODEX_FREE, "resume", "--last"),
    compacted="helping the next LLM seamlessly continue the work",
    calls=one_by_one(codex.command),
    careful=_CODEX,
    refusal="commandrefused",
    image_flags=("-i", PICTURE),
)

# Its first prompt alone is larger than the limit of `environment`.
_CODE: Final = ("--model", codex.CODE_MODEL, "-c", "model_auto_compact_token_limit=110000")
CODEX_CODE: Final = CODEX._replace(
    name="codex-code",
    models=codex.CODE_MODEL,
    task=(*_CODEX_FREE, *_CODE),
    resume=(*_CODEX_FREE, *_CODE, "resume", "--last"),
    calls=codex.programs,
    careful=(*_CODEX, *_CODE),
)

_CLAUDE: Final = (str(BIN / "claude"), "--model", "claude-sonnet-4-5")
CLAUDE: Final = Agent(
    name="claude",
    models="claude-sonnet-4-5",
    task=(*_CLAUDE, "--allowedTools", "Bash", "-p"),
    resume=(*_CLAUDE, "--allowedTools", "Bash", "--continue", "-p"),
    compacted="Tool calls will be rejected and you will fail the task",
    calls=one_by_one(_claude),
    careful=(*_CLAUDE, "-p"),
    refusal="requires approval",
    image_prompt="imageword",
)

_OPENCODE: Final = (str(BIN / "opencode"), "run")
OPENCODE: Final = Agent(
    name="opencode",
    models="coder",
    task=_OPENCODE,
    resume=(*_OPENCODE, "--continue"),
    compacted="that context was compacted",
    calls=one_by_one(_opencode),
    careful=_OPENCODE,
    refusal="prevents you from using",
    image_flags=("-f", PICTURE),
    interrupts=2,
)

_QWEN: Final = (str(BIN / "qwen"), "--auth-type", "openai")
QWEN: Final = Agent(
    name="qwen",
    models="coder",
    task=(*_QWEN, "--yolo", "-p"),
    resume=(*_QWEN, "--yolo", "--continue", "-p"),
    compacted="Then, produce the <state_snapshot> XML",
    calls=one_by_one(_qwen),
    careful=(*_QWEN, "-p"),
    refusal="permission was declined",
    image_prompt=f"What is it? @{PICTURE}",
)

_AIDER: Final = (str(AIDER_BIN), "--model", "openai/gpt-4o", "--yes-always", "add.py")
AIDER: Final = Agent(
    name="aider",
    models="gpt-4o,gpt-4o-mini",
    task=(*_AIDER, "--auto-test", "--test-cmd", "python3 add.py", "--message"),
    resume=(*_AIDER, "--restore-chat-history", "--message"),
    compacted="*Briefly* summarize this partial conversation",
    image_flags=("--file", PICTURE),
)
AGENTS: Final = (CODEX, CODEX_CODE, CLAUDE, OPENCODE, QWEN, AIDER)


BRIEF: Final = 64
"""Tokens of an answer that agents ask a slow model for."""

CUT_OFF: Final = f"exceeded the {BRIEF} output token maximum"
"""What Claude Code ends with where an answer is as short as these tests want it: its requests are answered all the same."""

SLOW_MS: Final = 3_600_000


def environment(
    home: Path,
    url: str,
    *,
    compacts: bool = False,
    careful: bool = False,
    websockets: bool = False,
    patient: bool = False,
) -> dict[str, str]:
    """An environment in which all of them find the fleet, and nothing of the user's.

    `compacts`: the context is so small that each has its conversation summarized. `careful`: opencode may not run Python, the others
    have flags for that. `websockets`: Codex takes Responses over a WebSocket. `patient`: they wait for a slow model, and those that limit
    its answers ask for short ones.
    """
    _configure_codex(home, url, compacts=compacts, websockets=websockets, patient=patient)
    _configure_opencode(home, url, compacts=compacts, careful=careful, patient=patient)
    _configure_qwen(home, compacts=compacts, patient=patient)
    (home / ".aider.conf.yml").write_text("max-chat-history-tokens: 100\n" if compacts else "{}\n")
    found = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_MODEL": QWEN.models,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "AIDER_ANALYTICS": "false",
        "AIDER_CHECK_UPDATE": "false",
    }
    if compacts:
        found["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = "190000"
    if patient:
        found |= {"API_TIMEOUT_MS": str(SLOW_MS), "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(SLOW_MS)}
        found |= {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(BRIEF), "MAX_THINKING_TOKENS": "0"}
    return found


def _configure_codex(home: Path, url: str, *, compacts: bool, websockets: bool, patient: bool) -> None:
    lines = [f'model = "{CODEX.models}"', 'model_provider = "headwater"']
    if compacts:
        lines.append("model_auto_compact_token_limit = 60000")
    lines += ["[model_providers.headwater]", 'name = "headwater"', f'base_url = "{url}/v1"']
    lines += ['wire_api = "responses"', f"supports_websockets = {str(websockets).lower()}"]
    if patient:
        lines.append(f"stream_idle_timeout_ms = {SLOW_MS}")
    _write(home / ".codex" / "config.toml", "\n".join(lines) + "\n")


def _configure_opencode(home: Path, url: str, *, compacts: bool, careful: bool, patient: bool) -> None:
    model = {
        "name": OPENCODE.models,
        "attachment": True,
        "modalities": {"input": ["text", "image"], "output": ["text"]},
        "limit": {"context": 90_000 if compacts else 400_000, "output": BRIEF if patient else 8_000},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "headwater",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"} | ({"timeout": SLOW_MS} if patient else {}),
        "models": {OPENCODE.models: model},
    }
    config: dict[str, Any] = {"provider": {"headwater": provider}, "model": f"headwater/{OPENCODE.models}"}
    if careful:
        config["permission"] = {"bash": {"*": "allow", "python3 *": "deny"}}
    _write(home / ".config" / "opencode" / "opencode.json", json.dumps(config))


def _configure_qwen(home: Path, *, compacts: bool, patient: bool) -> None:
    generation: dict[str, Any] = {
        "contextWindowSize": 170_000 if compacts else 400_000,
        "modalities": {"image": True},
    }
    if patient:
        generation |= {"timeout": SLOW_MS, "samplingParams": {"max_tokens": BRIEF}}
    settings = {"model": {"generationConfig": generation}, "context": {"autoCompactThreshold": 0.6}}
    _write(home / ".qwen" / "settings.json", json.dumps(settings))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
