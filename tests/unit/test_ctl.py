"""The words of `headwater ctl`, and settings that would open an unguarded port."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headwater.ops import admin, ctl
from headwater.ops.cli import parser
from headwater.ops.config import ConfigError, Settings, resolve
from headwater.schemas.control import Command


@pytest.mark.parametrize(
    ("line", "command", "arguments"),
    [
        ("worker-0 sleep --level 1", "sleep", {"level": 1}),
        ("worker-0 pause --mode keep", "pause", {"mode": "keep"}),
        ("worker-0 drain --within-s 2.5", "drain", {"within_s": 2.5}),
        ("worker-0 role prefill", "role", {"role": "prefill"}),
        ("worker-0 load-lora NAME hf://a/b", "load-lora", {"name": "NAME", "source": "hf://a/b"}),
        ("worker-0 unload-lora NAME --forget", "unload-lora", {"name": "NAME", "forget": True}),
        ("worker-0 taint batch", "taint", {"name": "batch"}),
        ("worker-0 untaint batch", "untaint", {"name": "batch"}),
        ("--json worker-0 status", "status", {}),
    ],
)
def test_words_become_a_command(line: str, command: Command, arguments: dict[str, Any]) -> None:
    """Names and places without flags, the rest with."""
    parsed = parser().parse_args(["ctl", *line.split()])
    assert ctl.asked(parsed.words[1:], parsed) == (command, arguments)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "ctl WORKER COMMAND"),
        (["explode"], "no command 'explode'"),
        (["sleep", "2"], "sleep takes no words"),
    ],
)
def test_words_that_are_no_command(words: list[str], told: str) -> None:
    """The message says what there is."""
    with pytest.raises(ConfigError, match=told):
        ctl.asked(words, parser().parse_args(["ctl"]))


def test_who_asks_has_a_name() -> None:
    """For the audit."""
    user, _, host = ctl.whoami().partition("@")
    assert user
    assert host


@pytest.mark.parametrize(("token", "told"), [("short", "at least 16"), ("", "no token")])
async def test_no_admin_port_without_a_good_token(tmp_path: Path, token: str, told: str) -> None:
    """It refuses to start, and says how a token is made."""
    file = tmp_path / "token"
    file.write_text(token)
    settings = Settings(admin_port=1, admin_token_file=str(file))
    with pytest.raises(ConfigError, match=told):
        await admin.admin(settings, asyncio.Event())
    with pytest.raises(ConfigError, match="nobody may control workers without a token"):
        await admin.admin(Settings(admin_port=1), asyncio.Event())
    with pytest.raises(ConfigError, match="--admin-port"):
        await admin.admin(Settings(admin_token_file=str(file)), asyncio.Event())
    with pytest.raises(ConfigError, match="--admin-token-file"):
        admin.tokens_of(Settings(admin_token_file=str(tmp_path / "none")))


def test_the_admin_port_is_off_and_on_loopback_by_default() -> None:
    """Whoever wants more says so."""
    settings = resolve(parser().parse_args(["up"]), {})
    assert (settings.admin_port, settings.admin_host) == (0, "127.0.0.1")
