"""Variables: empty ones, those that Kubernetes sets for services, and mistyped ones."""

import pytest

from headwater.ops.commands.application import main, parse
from headwater.ops.config.processes import all_settings
from headwater.ops.config.setting import ConfigError, Setting
from tests.support.processes.line import settings_of

SETTINGS = all_settings()
HOSTS = [one for one in SETTINGS.values() if one.metavar == "HOST"]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in SETTINGS.values():
        monkeypatch.delenv(one.variable, raising=False)


@pytest.mark.parametrize("line", [["up"], ["edge"], ["router"], ["engine"], ["admin"]])
def test_empty_variables_give_nothing(monkeypatch: pytest.MonkeyPatch, line: list[str]) -> None:
    """As templates write those without a value: the default holds, not no address, which is every address."""
    usual = settings_of(*line)
    for one in SETTINGS.values():
        monkeypatch.setenv(one.variable, "")
    for name in ("HEADWATER_CONFIG", "HEADWATER_CONFIG_KEY"):
        monkeypatch.setenv(name, "")
    bound, sources = parse(line)
    assert bound.arguments["settings"] == usual
    assert not sources.origins


@pytest.mark.parametrize("one", HOSTS, ids=lambda one: one.key)
def test_an_empty_host_is_refused(one: Setting) -> None:
    """On a command line it is a mistake: one line that says what means every address."""
    with pytest.raises(ConfigError) as caught:
        parse(["up", f"{one.flag}="])
    assert one.flag in str(caught.value)
    assert "0.0.0.0" in str(caught.value)


@pytest.mark.parametrize(
    ("service", "names"),
    [("HEADWATER", ("PORT",)), ("HEADWATER_NATS", ("NATS_PORT",)), ("HEADWATER_METRICS", ("METRICS_PORT",))],
)
def test_variables_of_a_service_are_no_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], service: str, names: tuple[str, ...]
) -> None:
    """Kubernetes sets them in every pod of a namespace that has services of these names."""
    usual = settings_of("up")
    for name, text in {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8000",
        "SERVICE_PORT_HTTP": "8000",
        "PORT": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP_PROTO": "tcp",
        "PORT_8000_TCP_PORT": "8000",
        "PORT_8000_TCP_ADDR": "10.0.0.1",
    }.items():
        monkeypatch.setenv(f"{service}_{name}", text)
    assert settings_of("up") == usual
    assert main(["config", "show", "--json"]) == 0
    assert capsys.readouterr().err == ""
    # A setting is one, next to them.
    for name in names:
        monkeypatch.setenv(f"HEADWATER_{name}", "9000")
    assert settings_of("up") != usual


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("HEADWATER_PROT", "HEADWATER_PORT"),
        ("HEADWATER_NATS_URL", "HEADWATER_NATS"),
        ("HEADWATER_NAMESPCE", "HEADWATER_NAMESPACE"),
        ("HEADWATER_HTTP_PORT", "HEADWATER_PORT"),
        ("HEADWATER_XYZZY", ""),
    ],
)
def test_a_mistyped_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, meant: str
) -> None:
    """With the one that it most likely stands for; the command goes on."""
    monkeypatch.setenv(variable, "1")
    assert main(["config", "show", "--json"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if variable in line]
    assert len(lines) == 1
    assert meant in lines[0]
    assert ("did_you_mean" in lines[0] or "did you mean" in lines[0]) == bool(meant)


@pytest.mark.parametrize(
    "variable",
    [
        "HEADWATER_CONFIG",
        "HEADWATER_ENVIRONMENT_OF",
        "HEADWATER_FIRST_FAILURE",
        "HEADWATER_EMBEDDINGS_FOLDER",
    ],
)
def test_our_own_variables_are_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    """Those that processes pass on, and those of other commands."""
    monkeypatch.setenv(variable, "")
    monkeypatch.setenv("HEADWATER_SIM_BLOCKS", "64")
    assert main(["config", "show", "--command", "router", "--json"]) == 0
    assert capsys.readouterr().err == ""
