"""Configuration files: unknown keys, and files that cannot be read."""

from pathlib import Path

import pytest

from headwater.ops.commands.application import parse
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.tree import nearest_key


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
        ("[queue]\nrequest = 1\n", "unknown setting queue.request; did you mean queue.requests?"),
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


def test_the_nearest_key() -> None:
    assert nearest_key("router_temperature") == "router.temperature"
    assert nearest_key("metrics.prot") == "metrics.port"
    assert nearest_key("xyzzy") == ""


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Missing, a folder, or not text at all: one line with its name, no traceback."""
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b'name = "\xff\xfe"')
    for path in (tmp_path / "missing.toml", tmp_path, binary):
        with pytest.raises(ConfigError) as caught:
            parse(["up", "--config", str(path)])
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
