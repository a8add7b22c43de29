"""Settings: which source wins, where each value comes from, and errors that name the setting and its source."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from headwater.actors.media.request import MediaLimits
from headwater.actors.worker.settings import HealthSettings
from headwater.engines.sim import StepTime
from headwater.ops.commands.application import parse
from headwater.ops.commands.config import commands
from headwater.ops.config import processes
from headwater.ops.config.command import Command
from headwater.ops.config.processes import (
    DEFAULTS,
    EdgeProcess,
    EngineProcess,
    LocalFleetSettings,
    RouterProcess,
    ShadowProcess,
    all_settings,
    process_words,
    settings_below,
    with_settings,
)
from headwater.ops.config.setting import ConfigError, Setting, cache_folder, value_at, with_values
from headwater.router.policies import POLICIES
from headwater.router.queue import BusyLimits, QueueLimits
from headwater.schemas.routing import PolicyName
from tests.support.processes.line import settings_of

SETTINGS = all_settings()


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (*SETTINGS.values(),):
        monkeypatch.delenv(one.variable, raising=False)
    monkeypatch.delenv("HEADWATER_CONFIG", raising=False)
    monkeypatch.delenv("HEADWATER_CONFIG_KEY", raising=False)


def other(one: Setting) -> tuple[str, Any]:
    """A usable value of a setting that is not its default: as text, and as it is read."""
    special: dict[str, tuple[str, Any]] = {
        "worker.engine": ("sim", "sim"),
        "worker.engine_options": ('{"delay_s": 0.5}', {"delay_s": 0.5}),
        "tensorrt_llm.overrides": ('{"max_batch_size": 8}', {"max_batch_size": 8}),
        "vllm.native": ("--seed 3 --model 'a b'", ("--seed", "3", "--model", "a b")),
        "vllm.connector_options": ('{"nixl": {"num_threads": 8}}', {"nixl": {"num_threads": 8}}),
        "worker.logits_processors": ("a=m:A, b=n:B", {"a": "m:A", "b": "n:B"}),
        "sglang.native": ("--tp-size 2", ("--tp-size", "2")),
        "router.weights": ("crowding=0.5,queued=2", {"crowding": 0.5, "queued": 2.0}),
        "sim.step_time": ("1,2,3,4,5,6,7,8,9", StepTime((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0))),
        "streams.replicas": ("3", 3),
        "worker.endpoint": ("10.0.0.7:8000", "10.0.0.7:8000"),
        "edge.client.choices_max": ("7", 7),
        "fleet.workers": ("3", 3),
        "media.schemes": ("https, file", ("https", "file")),
        "media.ports": ("8443, 8080", (8443, 8080)),
    }
    if one.key in special:
        return special[one.key]
    if one.fields:
        name, field = next(iter(one.fields.items()))
        text, value = other(field)
        return f"{name}={text}", with_values(one.default, {field.path: value})
    if one.repeatable:
        return "one, two", ("one", "two")
    if one.choices:
        value = next(choice for choice in one.choices if choice != one.default)
        return str(value), value
    match one.default:
        case bool():
            return str(not one.default).lower(), not one.default
        case int():
            return str(one.default + 7), one.default + 7
        case float():
            number = one.default + 0.25
            return str(number), number
    return f"some-{one.flag[2:]}", f"some-{one.flag[2:]}"


def table(key: str, value: Any) -> str:
    """A file with one setting."""
    section, _, name = key.rpartition(".")
    head = f"[{section}]\n" if section else ""
    literal = value if isinstance(value, str) else json.dumps(value)
    return f"{head}{name} = {literal}\n"


def as_yaml(values: dict[str, Any]) -> str:
    """A file with many settings."""
    document: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        place = document
        for part in filter(None, section.split(".")):
            place = place.setdefault(part, {})
        place[name] = value
    return json.dumps(document)


def used_by(command: str) -> set[str]:
    """Keys of a command's settings."""
    found = next(one for _, name, one in commands() if name == command)
    assert isinstance(found, Command)
    return {one.key for one in found.settings}


def written(folder: Path, text: str, name: str = "headwater.toml") -> str:
    """A configuration file."""
    path = folder / name
    path.write_text(text)
    return str(path)


def test_without_any_source_the_defaults_hold() -> None:
    assert settings_of("up") == LocalFleetSettings()
    assert settings_of("router") == RouterProcess()


def test_every_policy_that_may_be_named_is_there() -> None:
    assert set(get_args(PolicyName)) == set(POLICIES)


@pytest.mark.parametrize("command", ["up", "edge", "router", "engine", "admin", "tree"])
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_every_setting_can_come_from_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, source: str
) -> None:
    """With the same meaning: all settings of a command at once, each with a value of its own."""
    own = [one for one in SETTINGS.values() if one.key in used_by(command)]
    given = {one.key: other(one) for one in own}
    line = [command]
    if source == "flag":
        for one in own:
            text, value = given[one.key]
            line += one.words(value) if one.base is bool else [f"{one.flag}={text}"]
        wanted = {
            one.key: (one.flag if one.base is not bool else one.words(given[one.key][1])[0]) for one in own
        }
    elif source == "environment":
        for one in own:
            monkeypatch.setenv(one.variable, given[one.key][0])
        wanted = {one.key: one.variable for one in own}
    else:
        values = {
            key: value if isinstance(value, int | float) else text for key, (text, value) in given.items()
        }
        path = written(tmp_path, as_yaml(values), "headwater.yaml")
        line += ["--config", path]
        wanted = {one.key: f"{path}: {one.key}" for one in own}
    bound, sources = parse(line)
    found = bound.arguments["settings"]
    assert {one.key: value_at(found, one.path) for one in own} == {
        key: value for key, (_, value) in given.items()
    }
    assert sources.origins == {key: (source, where) for key, where in wanted.items()}


def test_every_setting_is_described_and_can_be_passed_on() -> None:
    """The words that `up` passes to its processes mean the same to them."""
    for one in SETTINGS.values():
        assert one.description, one.key
        _, value = other(one)
        assert value != one.default, one.key
        assert one.read([one.write(value)], "") == value, one.key


def test_every_setting_is_used_by_a_command() -> None:
    names = [name for _, name, one in commands() if isinstance(one, Command)]
    assert {key for name in names for key in used_by(name)} == set(SETTINGS)


def test_two_settings_of_one_flag_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an engine of another package: which of them a line means could not be told."""
    again = settings_below("queue")
    monkeypatch.setattr(processes, "settings_below", lambda _: again)
    with pytest.raises(ConfigError, match="the flag --queue, which queue has too: rename the engine"):
        all_settings.__wrapped__()


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting by itself, and the origin of each is known."""
    path = written(tmp_path, '[http]\nport = 1\nhost = "file"\n[fleet]\nworkers = 1\n')
    monkeypatch.setenv("HEADWATER_CONFIG", path)
    monkeypatch.setenv("HEADWATER_PORT", "2")
    monkeypatch.setenv("HEADWATER_WORKERS", "2")
    bound, sources = parse(["up", "--port", "3"])
    found = bound.arguments["settings"]
    assert (found.http.port, found.fleet.workers, found.http.host) == (3, 2, "file")
    assert found.nats.port == DEFAULTS.nats.port
    assert sources.origins == {
        "http.port": ("flag", "--port"),
        "fleet.workers": ("environment", "HEADWATER_WORKERS"),
        "http.host": ("file", f"{path}: http.host"),
    }


def test_the_last_of_several_flags_wins() -> None:
    """So that a wrapper's flags can be overridden."""
    assert settings_of("up", "--port", "1", "--port", "2").http.port == 2
    assert not settings_of("up", "--lora-on-demand", "--no-lora-on-demand").lora.loading.on_demand


def test_booleans_are_flags_with_an_opposite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By environment and in a file they are true or false; yes and no in text, as before."""
    assert settings_of("up", "--lora-on-demand", "--no-lora-check-base").lora.loading == (True, False, 120.0)
    for text, value in (("yes", True), ("true", True), ("1", True), ("no", False), ("off", False)):
        monkeypatch.setenv("HEADWATER_NATS_TLS_FIRST", text)
        assert settings_of("router").nats.tls_first is value
    monkeypatch.setenv("HEADWATER_NATS_TLS_FIRST", "maybe")
    with pytest.raises(ConfigError, match="HEADWATER_NATS_TLS_FIRST=maybe: expected true or false"):
        settings_of("router")
    monkeypatch.delenv("HEADWATER_NATS_TLS_FIRST")
    path = written(tmp_path, "[nats]\ntls_first = true\n")
    assert settings_of("router", "--config", path).nats.tls_first is True


def test_a_flag_that_may_be_repeated(tmp_path: Path) -> None:
    """Each time adds, with or without commas; a file may have a list, or a single value; empty is none."""
    assert settings_of("up", "--taint", "a", "--taint", "b,c").worker.profile.taints == ("a", "b", "c")
    path = written(tmp_path, '[worker]\ntaints = ["a", "b"]\n')
    assert settings_of("up", "--config", path).worker.profile.taints == ("a", "b")
    path = written(tmp_path, "[media]\nports = 8443\n")
    assert settings_of("up", "--config", path).media.fetch.ports == (8443,)
    assert settings_of("up", "--client-policies=").edge.client.policies == ()
    with pytest.raises(ConfigError, match=r"--taint no\.way: .*regex"):
        settings_of("up", "--taint", "no.way")


def test_a_config_flag_wins_over_the_environments_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files are not merged."""
    first = written(tmp_path, "[http]\nport = 1\n", "a.toml")
    monkeypatch.setenv("HEADWATER_CONFIG", written(tmp_path, "[fleet]\nworkers = 5\n", "b.toml"))
    found = settings_of("up", "--config", first)
    assert (found.http.port, found.fleet.workers) == (1, None)


def test_one_file_serves_all_commands(tmp_path: Path) -> None:
    """Each takes its own part; settings of other commands are no error."""
    path = written(
        tmp_path,
        "nats:\n  namespace: prod\nrouter:\n  policy: random\n  weights: {crowding: 0.5}\nhttp: {port: 9000}\n",
        "headwater.yaml",
    )
    assert settings_of("edge", "--config", path).http.port == 9000
    router = settings_of("router", "--config", path)
    assert (router.nats.namespace, router.router.policy) == ("prod", "random")
    assert router.router.weights == {"crowding": 0.5}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("http.port", "eighty"),
        ("http.port", "70000"),
        ("http.port", "-1"),
        ("nats.port", "65536"),
        ("metrics.port", "-1"),
        ("fleet.workers", "-1"),
        ("fleet.workers", "0"),
        ("fleet.workers", "2.5"),
        ("streams.replicas", "0"),
        ("streams.replicas", "7"),
        ("sim.blocks", "3"),
        ("sim.step_time", "1,2,3"),
        ("sim.step_time", "1,2,3,4,5,nan"),
        ("worker.engine", "cuda"),
        ("drain_timeout", "soon"),
        ("drain_timeout", "-1"),
        ("worker.block_size", "-16"),
        ("worker.max_model_len", "-1"),
        ("log.level", "loud"),
        ("nats.tls_first", "maybe"),
        ("queue", "tenant_share=0"),
        ("queue", "tenant_share=1.1"),
        ("queue", "wait_s=0"),
        ("queue", "order=last"),
        ("busy", "kv=-1"),
        ("router.weights", "crowding"),
        ("router.weights", "crowdin=1"),
        ("vllm.connector_options", "{"),
        ("worker.logits_processors", "a=b"),
    ],
)
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_an_unusable_value_is_named_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, source: str
) -> None:
    """The line says what to change, and where."""
    one = SETTINGS[key]
    command = next(name for name in ("tree", "admin", "router", "edge", "engine") if key in used_by(name))
    line = [command]
    if source == "flag":
        if one.base is bool:
            return
        line, wanted = [command, f"{one.flag}={value}"], f"{one.flag} {value}: "
    elif source == "environment":
        monkeypatch.setenv(one.variable, value)
        wanted = f"{one.variable}={value}: "
    else:
        number = value.lstrip("-").replace(".", "", 1).isdigit()
        path = written(tmp_path, table(key, value if number else json.dumps(value)))
        line, wanted = [command, "--config", path], f"{path}: {key} = {value}: "
    with pytest.raises(ConfigError) as caught:
        parse(line)
    assert str(caught.value).startswith(wanted)
    assert "\n" not in str(caught.value)


def test_a_table_is_one_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As text or as a table of a file, with the defaults of what is left out; a stronger source changes what it names."""
    path = written(tmp_path, "[media.limits]\nimage_bytes_max = 5\nvideo_fetch_s = 0.5\n")
    limits = settings_of("edge", "--config", path).media.limits
    assert (limits.image.bytes_max, limits.video.fetch_s) == (5, 0.5)
    assert limits.audio == MediaLimits().audio
    monkeypatch.setenv("HEADWATER_MEDIA_LIMITS", "file_pages_max=7 audio_bytes_max=9")
    limits = settings_of("edge", "--config", path).media.limits
    assert (limits.file.pages_max, limits.audio.bytes_max, limits.image.bytes_max) == (7, 9, 5)
    flags = ("--media-limits=image_bytes_max=6", "--media-limits=image_fetch_s=1")
    limits = settings_of("edge", "--config", path, *flags).media.limits
    assert (limits.image.bytes_max, limits.image.fetch_s, limits.video.fetch_s) == (6, 1.0, 0.5)
    assert (limits.file.pages_max, limits.audio.bytes_max) == (7, 9)
    assert settings_of("edge", *flags).media.limits.image.bytes_max == 6
    monkeypatch.delenv("HEADWATER_MEDIA_LIMITS")
    empty = written(tmp_path, "media:\n  limits:\n    # nothing\n", "empty.yaml")
    assert settings_of("edge", "--config", empty).media.limits == MediaLimits()


@pytest.mark.parametrize("one", [one for one in SETTINGS.values() if one.fields], ids=lambda one: one.key)
def test_a_table_names_what_is_wrong_in_it(one: Setting) -> None:
    """Its name, the range, and the names that there are."""
    for name, field in one.fields.items():
        assert field.description, name
        if field.base is str:
            continue
        with pytest.raises(
            ConfigError,
            match=rf"^{one.flag} {name}=-1: {name}=-1: (expected (.* >=? \d+|true or false)|choose from)",
        ):
            one.read([f"{name}=-1"], f"{one.flag} ")
        with pytest.raises(ConfigError, match=f"{name}=nan: "):
            one.read([{name: "nan"}], "file: ")
    with pytest.raises(ConfigError, match=f"no_such_name: names are .*{name}"):
        one.read(["no_such_name=1"], "")
    with pytest.raises(ConfigError, match="no_such_name: give NAME=VALUE"):
        one.read(["no_such_name"], "")
    refused: tuple[object, ...] = (3, 0, False, [])
    for wrong in refused:
        with pytest.raises(ConfigError, match=f"expected a table, got a {type(wrong).__name__}"):
            one.read([wrong], "")


def test_a_process_gets_the_settings_of_its_fleet() -> None:
    """Its command line has what differs from the defaults, and nothing else."""
    assert process_words(RouterProcess()) == []
    router = with_settings(
        RouterProcess(name="r"),
        {
            "router.policy": "random",
            "router.weights": {"crowding": 0.5},
            "busy": BusyLimits(prefill_tokens=7, kv=0.5),
            "queue": QueueLimits(requests=0, order="shortest_uncached", wait_s=10.0),
            "nats.tls_first": True,
        },
    )
    assert settings_of("router", *process_words(router)) == router
    for policies in ((), ("kv", "random")):
        edge = with_settings(EdgeProcess(), {"edge.client.policies": policies, "edge.client.choices_max": 3})
        assert settings_of("edge", *process_words(edge)) == edge
    engine = with_settings(
        EngineProcess(),
        {
            "worker.tier": "gold",
            "worker.taints": ("batch", "spot"),
            "vllm.connector_options": {"offload": {"cpu_bytes_to_use": 5}},
            "health": HealthSettings(idle_s=0.0),
            "lora.check_base": False,
        },
    )
    assert settings_of("engine", *process_words(engine)) == engine


def test_a_process_takes_only_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """By flag it is an error, and the environment of others does not reach it."""
    monkeypatch.setenv("HEADWATER_WORKERS", "5")
    assert not hasattr(settings_of("router"), "fleet")
    with pytest.raises(ConfigError, match="Unknown option: --workers"):
        parse(["router", "--workers", "5"])
    assert parse(["shadow", "--policy", "random"])[0].arguments == {
        "settings": ShadowProcess(),
        "policy": "random",
    }


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
    found = cache_folder(setting, environ)
    home = Path.home() / ".cache" / "headwater"
    assert found == (home if expected == "home" else expected and Path(expected))


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
