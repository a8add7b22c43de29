"""Files and folders in settings: `~` is the user's home wherever the setting comes from."""

from pathlib import Path

import pytest

from headwater.ops.commands.application import parse
from headwater.ops.config.processes import all_settings
from headwater.ops.config.setting import Setting
from tests.support.processes.line import settings_of

PATHS = [one for one in all_settings().values() if one.metavar in ("FILE", "FOLDER") and one.base is str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("one", PATHS, ids=lambda one: one.key)
def test_a_path_may_begin_with_the_home(home: Path, one: Setting) -> None:
    """No shell expands it in a file, after `--flag=` or in a variable of a service manager."""
    assert one.read(["~/some/where"], "") == f"{home}/some/where"
    assert one.read(["~"], "") == str(home)
    for text in ("", "none", "a~b", "./~", "/~"):
        assert one.read([text], "") == text


def test_from_every_source(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flag, variable and file; the configuration file itself too."""
    (home / "fleet.toml").write_text('[nats]\nkeys_dir = "~/keys"\n')
    assert settings_of("router", "--config=~/fleet.toml").nats.keys_dir == f"{home}/keys"
    monkeypatch.setenv("HEADWATER_CONFIG", "~/fleet.toml")
    assert settings_of("router").nats.keys_dir == f"{home}/keys"
    monkeypatch.setenv("HEADWATER_CACHE_DIR", "~/cache")
    assert settings_of("router").cache_dir == f"{home}/cache"


def test_a_home_that_is_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a name has none: the text stays, and is no traceback."""
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert settings_of("router", "--cache-dir=~/cache").cache_dir == "~/cache"
    parse(["router", "--nats-keys-dir=~nobody-of-this-name/keys"])
