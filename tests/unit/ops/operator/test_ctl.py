"""The words of `headwater ctl`, and settings that would open an unguarded port."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headwater.ops.commands.application import main
from headwater.ops.config.processes import AdminProcess
from headwater.ops.config.sections import AdminSettings, NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.operator import ctl
from headwater.ops.start import admin
from headwater.schemas.control import Command
from tests.support.processes.line import settings_of


@pytest.fixture(autouse=True)
def _logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command configures it for its whole process: it would outlive the test."""
    monkeypatch.setattr("headwater.engines.logs.configure", lambda *_, **__: None)


@pytest.mark.parametrize(
    ("line", "command", "arguments"),
    [
        ("worker-0 sleep --level 1", "sleep", {"level": 1}),
        ("worker-0 pause --mode keep", "pause", {"mode": "keep"}),
        ("worker-0 drain --drain-timeout 2.5", "drain", {"within_s": 2.5}),
        ("worker-0 role prefill", "role", {"role": "prefill"}),
        ("worker-0 load-lora NAME hf://a/b", "load-lora", {"name": "NAME", "source": "hf://a/b"}),
        ("worker-0 unload-lora NAME --forget", "unload-lora", {"name": "NAME", "forget": True}),
        ("worker-0 taint batch", "taint", {"name": "batch"}),
        ("worker-0 untaint batch", "untaint", {"name": "batch"}),
        ("--json worker-0 status", "status", {}),
    ],
)
def test_words_become_a_command(
    monkeypatch: pytest.MonkeyPatch, line: str, command: Command, arguments: dict[str, Any]
) -> None:
    """Names and places without flags, the rest with."""
    sent: list[ctl.ControlCall] = []

    async def keep(_: NatsSettings, call: ctl.ControlCall) -> int:
        sent.append(call)
        return 0

    monkeypatch.setattr(ctl, "ctl", keep)
    assert main(["ctl", *line.split()]) == 0
    [call] = sent
    assert ctl.parse_call(call.words[1:], call.given) == (command, arguments)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give WORKER COMMAND"),
        (["explode"], "no command 'explode'"),
        (["sleep", "2"], "sleep takes no arguments"),
    ],
)
def test_words_that_are_no_command(words: list[str], told: str) -> None:
    """The message says what there is."""
    with pytest.raises(ConfigError, match=told):
        ctl.parse_call(words, {})


def test_words_of_weights() -> None:
    """None to show, {} to remove, else by engine."""
    assert ctl.parse_weights([]) is None
    assert ctl.parse_weights(["remove"]) == {}
    assert ctl.parse_weights(["vllm=0.95", "sglang=0"]) == {"vllm": 0.95, "sglang": 0.0}
    assert ctl.parse_weights(["vllm=19", "sglang=1"]) == {"vllm": 19.0, "sglang": 1.0}


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (["vllm"], "got 'vllm'"),
        (["=1"], "got '=1'"),
        (["vllm=1", "remove"], "got 'remove'"),
        (["vllm=1", "vllm=2"], "vllm has two weights"),
        (["vllm="], "vllm=: a weight is a finite number"),
        (["vllm=nan"], "vllm=nan: a weight is"),
        (["vllm=inf"], "vllm=inf: a weight is"),
        (["vllm=-0.1"], "vllm=-0.1: a weight is"),
        (["vllm=0", "sglang=0"], "every weight is 0"),
    ],
)
def test_weights_that_are_none_are_named(words: list[str], mistake: str) -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError) as raised:
        ctl.parse_weights(words)
    assert mistake in str(raised.value)


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
    settings = AdminProcess(admin=AdminSettings(port=1, token_file=str(file)))
    with pytest.raises(ConfigError, match=told):
        await admin.admin(settings, asyncio.Event())
    with pytest.raises(ConfigError, match="control of workers requires a token"):
        await admin.admin(AdminProcess(admin=AdminSettings(port=1)), asyncio.Event())
    with pytest.raises(ConfigError, match="--admin-port"):
        await admin.admin(AdminProcess(admin=AdminSettings(token_file=str(file))), asyncio.Event())
    with pytest.raises(ConfigError, match="--admin-token-file"):
        admin.tokens_of(AdminSettings(token_file=str(tmp_path / "none")))


def test_the_admin_port_is_off_and_on_loopback_by_default() -> None:
    """Whoever wants more says so."""
    admin_settings = settings_of("up").admin
    assert (admin_settings.port, admin_settings.host) == (0, "127.0.0.1")
