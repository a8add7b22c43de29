"""Settings: which source wins, and errors that say which setting and where it came from."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.ops.config import ENV_PREFIX, ConfigError, Settings, add_flags, cache_dir, resolve
from headwater.ops.config_help import HELP

NAMES = tuple(field.name for field in msgspec.structs.fields(Settings))
DEFAULTS = Settings()


def flags(*arguments: str) -> Namespace:
    """These flags, parsed as the command line does."""
    parser = ArgumentParser()
    add_flags(parser, NAMES)
    return parser.parse_args(arguments)


def other(name: str) -> tuple[str, Any]:
    """A usable value of a setting that is not its default: as text, and as it is read."""
    special: dict[str, Any] = {
        "engine": "sim",
        "lora_on_demand": "yes",
        "lora_check_base": "no",
        "sim_step_time": "zero",
        "nats_tls_first": "yes",
        "replicas": 3,
        "workers": 3,
        "allow_special_tokens_in_text": "yes",
        "record_payloads": "full",
        "role": "decode",
        "disaggregate": "always",
        "queue_order": "shortest_uncached",
        "allow_mixed_versions": "yes",
        "allow_vulnerable_engine": "yes",
        "log_level": "error",
        "log_format": "json",
    }
    if name == "native":
        return "--seed 3 --model 'a b'", ("--seed", "3", "--model", "a b")
    if name == "connector_options":
        return '{"nixl": {"num_threads": 8}}', {"nixl": {"num_threads": 8}}
    if name == "logits_processors":
        return "a=m:A, b=n:B", {"a": "m:A", "b": "n:B"}
    if name in ("taint", "client_policies", "router_weights", "model_aliases"):
        return "one, two", ("one", "two")
    default = getattr(DEFAULTS, name)
    if name in special:
        return str(special[name]), special[name]
    if isinstance(default, int):
        return str(default + 7), default + 7
    if isinstance(default, float):
        return str(default + 0.5), default + 0.5
    return f"some-{name}", f"some-{name}"


def file_with(folder: Path, text: str) -> Path:
    """A configuration file."""
    path = folder / "headwater.toml"
    path.write_text(text)
    return path


def test_without_any_source_the_defaults_hold() -> None:
    """No flag, no environment, no file."""
    assert resolve(flags(), {}) == DEFAULTS


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_can_come_from_every_source(tmp_path: Path, name: str) -> None:
    """By flag, by environment and by file, with the same meaning, and it changes nothing else."""
    text, value = other(name)
    wanted = msgspec.structs.replace(DEFAULTS, **{name: value})
    if name == "native":
        # What is ours of it becomes ours.
        wanted = msgspec.structs.replace(wanted, model="a b")
    literal = text if isinstance(value, int | float) else json.dumps(text)
    path = file_with(tmp_path, f"{name} = {literal}\n")
    assert resolve(flags(f"--{name.replace('_', '-')}", text), {}) == wanted
    assert resolve(flags(), {ENV_PREFIX + name.upper(): text}) == wanted
    assert resolve(flags("--config", str(path)), {}) == wanted
    assert resolve(flags(), {ENV_PREFIX + "CONFIG": str(path)}) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_says_what_it_is_for(name: str) -> None:
    """Help texts are complete, and name the variable."""
    assert HELP[name]
    parser = ArgumentParser()
    add_flags(parser, NAMES)
    assert ENV_PREFIX + name.upper() in parser.format_help().replace("\n", "")
    assert set(HELP) == set(NAMES)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    """The nearer to the one who types, the stronger; each setting by itself."""
    path = file_with(tmp_path, 'port = 1\nworkers = 1\nhost = "file"\n')
    environ = {ENV_PREFIX + "CONFIG": str(path), ENV_PREFIX + "PORT": "2", ENV_PREFIX + "WORKERS": "2"}
    settings = resolve(flags("--port", "3"), environ)
    assert (settings.port, settings.workers, settings.host) == (3, 2, "file")
    assert settings.nats_port == DEFAULTS.nats_port


def test_a_flag_that_may_be_repeated(tmp_path: Path) -> None:
    """Each time adds, with or without commas; a file may have a list."""
    wanted = msgspec.structs.replace(DEFAULTS, taint=("a", "b", "c"))
    assert resolve(flags("--taint", "a", "--taint", "b,c"), {}) == wanted
    path = file_with(tmp_path, 'taint = ["a", "b", "c"]\n')
    assert resolve(flags("--config", str(path)), {}) == wanted
    with pytest.raises(ConfigError, match=r"--taint: taint = .*no\.way"):
        resolve(flags("--taint", "no.way"), {})


def test_a_config_flag_wins_over_the_environments_file(tmp_path: Path) -> None:
    """Two files are not mixed."""
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("port = 1\n")
    second.write_text("workers = 5\n")
    settings = resolve(flags("--config", str(first)), {ENV_PREFIX + "CONFIG": str(second)})
    assert (settings.port, settings.workers) == (1, DEFAULTS.workers)


def test_a_command_takes_from_the_environment_what_it_has_no_flag_for() -> None:
    """Flags differ by command, settings do not."""
    parser = ArgumentParser()
    add_flags(parser, ("port",))
    settings = resolve(parser.parse_args([]), {ENV_PREFIX + "WORKERS": "5", "OTHER": "x"})
    assert settings.workers == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "eighty"),
        ("port", "70000"),
        ("port", "-1"),
        ("nats_port", "65536"),
        ("metrics_port", "-1"),
        ("workers", "-1"),
        ("replicas", "0"),
        ("replicas", "6"),
        ("workers", "2.5"),
        ("sim_blocks", "3"),
        ("engine", "cuda"),
        ("drain_s", "soon"),
        ("drain_s", "-1"),
        ("block_size", "-16"),
        ("max_model_len", "-1"),
        ("kv_cache_mib", "-1"),
        ("log_level", "loud"),
        ("nats_tls_first", "maybe"),
        ("replicas", "7"),
    ],
)
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_an_unusable_value_is_told_with_its_name_and_its_source(
    tmp_path: Path, name: str, value: str, source: str
) -> None:
    """Whoever reads the line knows what to change, and where."""
    variable, flag = ENV_PREFIX + name.upper(), "--" + name.replace("_", "-")
    path = file_with(tmp_path, f"{name} = {value if value[-1].isdigit() else repr(value)}\n")
    if source == "flag":
        arguments, environ, wanted = Namespace(**{name: value}), {}, flag
    elif source == "environment":
        arguments, environ, wanted = flags(), {variable: value}, variable
    else:
        arguments, environ, wanted = flags("--config", str(path)), {}, str(path)
    with pytest.raises(ConfigError) as caught:
        resolve(arguments, environ)
    assert name in str(caught.value)
    assert value in str(caught.value)
    assert wanted in str(caught.value)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("colour = 1\n", "unknown setting 'colour'"),
        ("[up]\nport = 1\n", "unknown setting 'up'"),
        ("port = \n", "config"),
        ("port = 1\nport = 2\n", "config"),
    ],
)
def test_a_file_with_something_else_in_it_is_refused(tmp_path: Path, text: str, wanted: str) -> None:
    """A misspelt name is not passed over; the file is named."""
    path = file_with(tmp_path, text)
    with pytest.raises(ConfigError, match=wanted) as caught:
        resolve(flags("--config", str(path)), {})
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Missing, a folder, or not text at all: one line with its name, no traceback."""
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b'name = "\xff\xfe"')
    for path in (tmp_path / "missing.toml", tmp_path, binary):
        with pytest.raises(ConfigError) as caught:
            resolve(flags("--config", str(path)), {})
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "environ", "expected"),
    [
        ("", {"XDG_CACHE_HOME": "/x"}, "/x/headwater"),
        ("", {"XDG_CACHE_HOME": "relative"}, "home"),
        ("", {"XDG_CACHE_HOME": ""}, "home"),
        ("", {}, "home"),
        ("/y/z", {"XDG_CACHE_HOME": "/x"}, "/y/z"),
        ("none", {"XDG_CACHE_HOME": "/x"}, None),
    ],
)
def test_the_cache_is_where_it_is_set_or_in_the_users_cache_folder(
    setting: str, environ: dict[str, str], expected: str | None
) -> None:
    """As the XDG base directories say; `none` is for nowhere."""
    found = cache_dir(Settings(cache_dir=setting), environ)
    home = Path.home() / ".cache" / "headwater"
    assert found == (home if expected == "home" else expected and Path(expected))
