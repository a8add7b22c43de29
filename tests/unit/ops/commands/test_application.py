"""The command line as a whole: help in groups, errors in one line, completion, `config show`."""

import contextlib
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pydantic  # noqa: F401
import pytest
from cyclopts import App

from headwater.ops.commands import COMMANDS, place_of
from headwater.ops.commands.application import main, parse
from headwater.ops.commands.config import command_docs, commands, commands_markdown, settings_markdown
from headwater.ops.config.command import Command
from headwater.ops.config.processes import all_settings
from headwater.ops.config.setting import ConfigError

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command configures it for its whole process: it would outlive the test."""
    monkeypatch.setattr("headwater.engines.logs.configure", lambda *_, **__: None)


def shown(capsys: Capture, monkeypatch: pytest.MonkeyPatch, *line: str) -> str:
    """What a command prints, on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "160")
    with contextlib.suppress(SystemExit):
        assert main(line) == 0
    return capsys.readouterr().out


def groups(text: str) -> list[str]:
    """Titles of the groups in help."""
    return [line.split("─ ")[1].split(" ─")[0] for line in text.splitlines() if line.startswith("╭─ ")]


def test_help_lists_all_commands_in_groups(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(capsys, monkeypatch, "--help")
    assert groups(text) == ["Options", *(title for title, _ in COMMANDS.values())]
    for _, names in COMMANDS.values():
        for name, summary in names.items():
            assert f"│ {name} " in text
            assert summary in text


def test_every_command_is_registered() -> None:
    """Each that a module has is in the table, or below one that is."""
    places = [place_of(group, name) for group, (_, names) in COMMANDS.items() for name in names]
    for module in {module for module, _ in places}:
        found = import_module(module)
        below = {
            id(one.default_command)
            for app in vars(found).values()
            if isinstance(app, App)
            for one in (app, *app.subapps)
        }
        for name, one in vars(found).items():
            if isinstance(one, Command) and one.__module__ == module:
                assert (module, name) in places or id(one) in below, name
    assert all(one.text for one in command_docs())


@pytest.mark.parametrize(
    ("command", "wanted", "unwanted"),
    [
        ("up", ["Fleet", "vLLM", "Routing", "Admission control", "HTTP", "NATS", "Logging"], []),
        (
            "router",
            ["Process", "Routing", "Admission control", "NATS"],
            ["HTTP", "vLLM", "Fleet", "LoRA adapters"],
        ),
        ("edge", ["HTTP", "Requests", "NATS"], ["Routing", "Admission control", "vLLM"]),
        ("whatif", ["Options", "Columns"], ["NATS", "Logging", "Configuration file"]),
        ("tree", ["Options", "Process", "NATS"], ["HTTP", "Routing", "Metrics"]),
        ("sim", ["Options"], ["NATS", "Logging"]),
    ],
)
def test_a_command_lists_only_the_settings_it_uses(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str, wanted: list[str], unwanted: list[str]
) -> None:
    """In groups, each flag with its variable and default."""
    text = shown(capsys, monkeypatch, command, "--help")
    assert set(wanted) <= set(groups(text))
    assert not set(unwanted) & set(groups(text))
    found = next(one for _, name, one in commands() if name == command)
    for one in found.settings if isinstance(found, Command) else ():
        assert f"{one.flag} " in text
        assert one.variable in text.replace("│ \n│", "")


def test_help_imports_no_engine_and_no_compiler() -> None:
    """It must be fast: nothing that a process needs only when it runs is imported."""
    program = (
        "import sys\nfrom headwater.ops.cli import main\n"
        "for line in (['--help'], ['up', '--help'], ['whatif', '--help'], ['engine', '--help'], ['tree', '--help'], ['tail', '--help']):\n"
        "    try: main(line)\n    except SystemExit: pass\n"
        "heavy = {'numba', 'numpy', 'vllm', 'nats', 'asyncio', 'uvloop', 'prometheus_client', 'structlog', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_commands_that_compute_nothing_import_no_compiler() -> None:
    """Numba takes a quarter of a second to import."""
    program = (
        "import sys\nfrom headwater.ops.debug import stuck, tail, top\nfrom headwater.ops.operator import explain, log\n"
        "print(sorted({'numba', 'llvmlite', 'vllm', 'torch'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("upp", "there is no command 'upp': did you mean up?"),
        ("xyzzy", "there is no command 'xyzzy': commands are up, demo"),
        ("up --prot 1", "Unknown option: --prot. Did you mean --port?"),
        ("up extra", "unexpected argument extra"),
        ("up --port", "--port requires an argument"),
        ("up --port 70000", "--port 70000: expected `int` <= 65535"),
        ("up --engine cuda", "--engine cuda: there is no engine 'cuda': installed are "),
        ("explain", "REQUEST requires an argument"),
        ("bench all", "there is no command 'bench all': commands are serve, hash"),
        ("sim", "give either --seed N or --seeds FROM:TO"),
        ("log --json", "--json is for --audit: give both"),
        ("snapshots --position 3", "--position is for --bookmark: give both"),
        ("snapshots --drop a --bookmark b", "exclude each other"),
        ("shadow", "--policy requires an argument"),
        ("shadow --policy best", "--policy"),
        ("edge -- --seed 1", "headwater edge: takes no engine arguments"),
        ("config show --command whatif", "--command whatif: choose from up"),
        ("completion tcsh", "Choose from"),
        ("switch --to a --to-policy kv", "give one of --to, --to-policy, --resume and --remove"),
        ("switch --resume --remove", "give one of --to"),
        ("switch --canary 5", "are for --to REVISION or --to-policy POLICY"),
        ("switch --resume --hold 5m", "are for --to REVISION"),
        ("switch --samples 3", "are for --to REVISION"),
        ("switch --to a --url http://h", "are where --prompts FILE is sent"),
        ("switch --to a --json", "--json is for showing the shares"),
        ("switch --to a --gate answers=1", "the gate answers and --prompts FILE need each other"),
        ("switch --to a --prompts f", "the gate answers and --prompts FILE need each other"),
        ("switch --to-policy kv --gate answers=1 --prompts f", "a policy changes no answers"),
        ("switch --to a --gate speed=1", "there is no gate 'speed'; gates are: errors"),
        ("switch --to a --canary 5 --steps 5,100", "give one of them"),
        ("switch --to a --steps 5,4,100", "write rising percentages"),
        ("switch --to a --hold soon", "--hold soon: write a time"),
        ("switch --canary 0 --to a", "> 0"),
        ("switch --canary 101 --to a", "<= 100"),
        ("switch --samples 0", ">= 1"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(capsys: Capture, line: str, wanted: str) -> None:
    """It names the flag and what to do."""
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("headwater: ")
    assert error.count("\n") == 1
    assert wanted in error


@pytest.mark.parametrize(
    ("shell", "mark"),
    [
        ("bash", "complete -F"),
        ("zsh", "#compdef headwater"),
        pytest.param("fish", "complete -c headwater", marks=pytest.mark.soak),
    ],
)
def test_completion_knows_commands_flags_and_choices(capsys: Capture, shell: str, mark: str) -> None:
    """For each shell a script on standard output."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (
        mark,
        "nats-config",
        "routing-weights",
        "no-lora-check-base",
        "hashed",
        "power_of_two",
    ):
        assert word in script


def test_config_show_names_the_origin_of_every_value(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Default, file, environment or flag; secrets are masked."""
    path = tmp_path / "fleet.toml"
    path.write_text(
        "[router]\npolicy = 'random'\nlocal_prefill_tokens = 7\n[queue]\nrequests = 7\n[http]\nport = 9000\n"
    )
    monkeypatch.setenv("HEADWATER_NATS", "nats://me:secret@host:4222")
    line = [
        "config",
        "show",
        "--command",
        "router",
        "--json",
        "--config",
        str(path),
        "--local-prefill-tokens",
        "8",
    ]
    assert main(line) == 0
    rows = {one["key"]: (one["value"], one["origin"]) for one in json.loads(capsys.readouterr().out)}
    assert rows["router.policy"] == ("random", f"file {path}: router.policy")
    assert rows["router.local_prefill_tokens"] == (8, "flag --local-prefill-tokens")
    assert rows["router.temperature"] == (0.0, "default")
    queue = {"requests": 7, "tenant_share": 0.5, "wait_s": 120.0, "order": "fcfs"}
    assert rows["queue"] == (queue, f"file {path}: queue")
    assert rows["nats.url"] == ("nats://host:4222", "environment HEADWATER_NATS")
    assert "http.port" not in rows
    assert main(["config", "show", "--command", "engine", "--model", "/m", "--", "--seed", "1"]) == 0
    text = capsys.readouterr().out
    assert "secret" not in text
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines()[2:]}
    assert lines["worker.model"] == ["/m", "flag", "--model"]
    assert lines["vllm.native"] == ["--seed", "1", "flag", "--"]


def test_defaults_of_a_command(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """`demo` takes free ports and `ctl` logs warnings only, unless a flag changes that; help shows it."""
    demo = parse(["demo"])[0].arguments["settings"]
    assert (demo.http.port, demo.nats.port, demo.data_dir, demo.log.level) == (0, 0, "", "warning")
    assert parse(["demo", "--port", "8000"])[0].arguments["settings"].http.port == 8000
    assert parse(["ctl", "list"])[0].arguments["settings"].log.level == "warning"
    assert "[default: warning]" in shown(capsys, monkeypatch, "ctl", "--help")


def test_the_engine_as_a_word_stands_for_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wins over the environment; a flag that says something else is an error."""
    monkeypatch.setenv("HEADWATER_ENGINE", "vllm")
    bound, sources = parse(["engine", "sim"])
    assert bound.arguments["settings"].worker.engine == "sim"
    assert sources.origins["worker.engine"] == ("flag", "--engine")
    assert parse(["engine", "sim", "--engine", "sim"])[0].arguments["settings"].worker.engine == "sim"
    with pytest.raises(ConfigError, match="sim and --engine vllm contradict each other"):
        parse(["engine", "sim", "--engine", "vllm"])


def test_the_reference_has_every_setting_and_command(capsys: Capture) -> None:
    """As Markdown for the documentation, and as JSON."""
    settings, text = settings_markdown(), commands_markdown()
    for one in all_settings().values():
        assert f"`{one.key}` | `{one.flag}` | `{one.variable}`" in settings
    for doc in command_docs():
        assert f"\n## {doc.name}\n" in f"\n{text}"
    assert {"whatif", "whatif log", "config show", "nats-config"} <= {doc.name for doc in command_docs()}
    assert main(["config", "reference", "--format", "json"]) == 0
    found = {one["key"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["router.local_prefill_tokens"]["default"] == "256"
    assert found["queue"]["commands"] == ["up", "demo", "router"]
    assert found["queue"]["fields"][0].items() >= {"name": "requests", "default": "4096"}.items()


LINES = [
    "up --engine sim --workers 3 --model-aliases a,b --taint x",
    "edge --media-ports 81,82 --oidc-audience a --no-probes",
    "router --routing-weights crowding=0.2 --policy slo",
    "engine vllm --role=prefill -- --seed 1",
    "whatif trace.jsonl --workers 2 --workers 4 --policy kv",
    "tune trace.jsonl --search queued --trials 4",
    "bench edge --keys",
    "bench serve http://h:1 --input-tokens uniform:1,2 --rate 1,2.5 --concurrency 8 --slo ttft=1s --no-ignore-eos",
    "advise trace.jsonl --model m --gpus 8xH100 --slo ttft=1s,itl=50ms --step-time default",
    "keys create --tenant t",
    "config show",
]


@pytest.mark.parametrize("line", LINES)
def test_lines_are_read_where_something_has_imported_pydantic(line: str) -> None:
    """Then cyclopts validates with it too, what our own converters return and the defaults of flags."""
    assert "pydantic" in sys.modules
    parse(line.split())


@pytest.mark.parametrize("line", LINES)
def test_the_settings_that_a_line_gives_are_enough_to_read_it(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments and origins are those of the parser that knows all settings of the command."""
    monkeypatch.setenv("HEADWATER_LOG_LEVEL", "error")
    fast, sources = parse(line.split())
    monkeypatch.setattr(Command, "for_line", lambda self, _words: self)
    whole, all_sources = parse(line.split())
    assert (fast, sources.origins) == (whole, all_sources.origins)
