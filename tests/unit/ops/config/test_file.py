"""Configuration files: unknown keys, and files that cannot be read."""

from pathlib import Path

import pytest

from headwater.ops.commands.application import parse
from headwater.ops.config.setting import ConfigError
from tests.support.processes.line import settings_of


def written(folder: Path, text: str) -> str:
    """A configuration file."""
    path = folder / "headwater.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("colour = 1\n", "unknown setting colour; sections and settings are name, pool"),
        ("[up]\nport = 1\n", "unknown setting up"),
        ("port = 1\n", "unknown setting port; it is http.port: write port in the table [http]"),
        ("workers = 1\n", "it is fleet.workers: write workers in the table [fleet]"),
        ("queue_requests = 1\n", "did you mean queue.requests?"),
        ("router_temperature = 1\n", "did you mean router.temperature?"),
        ("[metrics]\nprot = 1\n", "did you mean metrics.port?"),
        ("[http]\nbody_bytes_max = 1\n", "did you mean http.limits.body_bytes_max?"),
        ("[queue]\nrequest = 1\n", "request: names are requests, tenant_share, wait_s, order"),
        ("[nats]\nurll = 'x'\n", "did you mean nats.url?"),
        ("[worker]\nworkers = 1\n", "did you mean fleet.workers?"),
        ("[http]\nport = 1\nport = 2\n", "config"),
        ("port = \n", "config"),
    ],
)
def test_a_file_with_something_else_in_it_is_refused(tmp_path: Path, text: str, wanted: str) -> None:
    """A misspelt key is an error that names the nearest valid one; the file is named."""
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        parse(["up", "--config", path])
    assert wanted in str(caught.value)
    assert path in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Missing, a folder, or not text at all: one line with its name, no traceback."""
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b'name = "\xff\xfe"')
    for path in (tmp_path / "missing.toml", tmp_path, binary):
        with pytest.raises(ConfigError) as caught:
            parse(["up", "--config", str(path)])
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["fleet.toml", "fleet.yaml"])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, name: str) -> None:
    """As editors on Windows write it; the rest is UTF-8 whatever the locale says."""
    text = "[http]\nport = 9\n" if name.endswith("toml") else "http:\n  port: 9\n"
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + f"# für alle\n{text}".encode())
    assert settings_of("edge", "--config", str(tmp_path / name)).http.port == 9


@pytest.mark.parametrize("text", ["http:\nnats:\n  namespace: a\n", "http: ~\nnats: {namespace: a}\n"])
def test_a_section_without_keys_sets_nothing(tmp_path: Path, text: str) -> None:
    """What is left of one when all its keys are comments."""
    (tmp_path / "fleet.yaml").write_text(text)
    settings = settings_of("edge", "--config", str(tmp_path / "fleet.yaml"))
    assert settings.nats.namespace == "a"
    assert settings.http == settings_of("edge").http


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("http:\n  port: 1\n  port: 2\n", "port"),
        ("http:\n  port: 1\nnats:\n  port: 2\nhttp:\n  host: x\n", "http"),
        ("engines:\n  a:\n    seed: 1\n    seed: 2\n", "seed"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, text: str, key: str) -> None:
    """In YAML too, where the last one would win unnoticed; named with its line."""
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(["edge", "--config", str(path)])
    assert str(path) in str(caught.value)
    assert f"{key} " in str(caught.value)
    assert "twice" in str(caught.value)
    assert "line" in str(caught.value)


def test_keys_that_are_merged_may_be_given_again(tmp_path: Path) -> None:
    """YAML's `<<` gives defaults, which a table overrides."""
    (tmp_path / "fleet.yaml").write_text("engines:\n  a: &a\n    seed: 1\n  b:\n    <<: *a\n    seed: 2\n")
    parse(["edge", "--config", str(tmp_path / "fleet.yaml")])
