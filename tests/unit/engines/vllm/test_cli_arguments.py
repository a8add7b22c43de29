"""vLLM's own arguments on the way through: from command lines, files and settings, without vLLM."""

from pathlib import Path
from typing import Any

import pytest

from headwater.engines import native_arguments
from headwater.engines.engine import EngineUnavailable
from headwater.engines.vllm import config as vllm_config
from headwater.ops import cli
from headwater.ops.commands.serve import checked
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.setting import ENV_PREFIX, ConfigError
from tests.support.processes.line import settings_of

TOML = """
[http]
port = 9000

[engines.prefill]
model = "/models/a b"
tensor-parallel-size = 2
enable_prefix_caching = false
trust-remote-code = true
served_model_name = ["one", "two words"]
kv-transfer-config = { kv_connector = "NixlConnector", kv_role = "kv_both" }

[engines.decode]
seed = -1
"""

YAML = """
http: {port: 9000}
engines:
  prefill:
    model: /models/a b
    tensor-parallel-size: 2
    enable_prefix_caching: false
    trust-remote-code: true
    served_model_name: [one, two words]
    kv-transfer-config: {kv_connector: NixlConnector, kv_role: kv_both}
  decode:
    seed: -1
"""

PREFILL = (
    "--model=/models/a b",
    "--tensor-parallel-size=2",
    "--no-enable-prefix-caching",
    "--trust-remote-code",
    "--served-model-name",
    "one",
    "two words",
    '--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
)


def settings(*words: str, environ: dict[str, str] | None = None) -> EngineProcess:
    """The settings of `headwater engine` with these words."""
    with pytest.MonkeyPatch.context() as patch:
        for name, text in (environ or {}).items():
            patch.setenv(name, text)
        found: EngineProcess = checked(settings_of("engine", *words))
        return found


@pytest.mark.parametrize(("name", "text"), [("file.toml", TOML), ("file.yaml", YAML), ("file.yml", YAML)])
def test_a_section_becomes_words_of_the_engines_command_line(tmp_path: Path, name: str, text: str) -> None:
    """Dashes or underscores, booleans, lists, tables; settings beside it stay settings."""
    path = tmp_path / name
    path.write_text(text)
    found = settings("vllm", "--config", str(path), "--config-key", "engines.prefill")
    assert found.engines.vllm.native == PREFILL
    assert (found.worker.model, found.worker.served_model_name) == ("/models/a b", "one")
    assert settings_of("edge", "--config", str(path)).http.port == 9000
    by_environment = settings(
        "vllm", environ={ENV_PREFIX + "CONFIG": str(path), ENV_PREFIX + "CONFIG_KEY": "engines.decode"}
    )
    assert by_environment.engines.vllm.native == ("--seed=-1",)
    # A process without engine arguments can read the same file.
    assert settings("vllm", "--config", str(path)).engines.vllm.native == ()


def test_words_behind_the_dashes_pass_as_they_are() -> None:
    """Blanks, JSON, negations: nothing is taken apart. They come after the file's, and so win."""
    words = ("--max-num-seqs", "8", "--chat", '{"a": "b c"}', "--no-enable-prefix-caching", "--", "--x=y z")
    assert settings("vllm", "--", *words).engines.vllm.native == words


def test_words_come_from_the_file_the_environment_and_the_command_line(tmp_path: Path) -> None:
    """In this order: the last one wins in vLLM's parser."""
    path = tmp_path / "file.toml"
    path.write_text(TOML)
    flags = ("vllm", "--config", str(path), "--config-key", "engines.decode", "--", "--seed", "2")
    assert settings(*flags, environ={ENV_PREFIX + "NATIVE": "--seed 1 --x 'a b'"}).engines.vllm.native == (
        "--seed=-1",
        "--seed",
        "1",
        "--x",
        "a b",
        "--seed",
        "2",
    )


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("engines.nothing", ("engines.nothing", "engines.prefill", "engines.decode")),
        ("other", ("other", "no such table")),
        ("engines.decode.seed", ("engines.decode.seed", "value")),
    ],
)
def test_a_missing_key_is_named_with_what_there_is(tmp_path: Path, key: str, wanted: tuple[str, ...]) -> None:
    """And the file too."""
    path = tmp_path / "file.toml"
    path.write_text(TOML)
    with pytest.raises(ConfigError) as caught:
        settings("vllm", "--config", str(path), "--config-key", key)
    for text in ("--config-key", str(path), *wanted):
        assert text in str(caught.value)


def test_a_key_needs_a_file_and_the_file_must_be_there(tmp_path: Path) -> None:
    """Each error names what is missing."""
    with pytest.raises(ConfigError, match=r"--config-key engines.x: give the file with --config"):
        settings("vllm", "--config-key", "engines.x")
    missing = tmp_path / "missing.yaml"
    with pytest.raises(ConfigError, match=f"{missing}.*No such file"):
        settings("vllm", "--config", str(missing), "--config-key", "engines.x")


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "a: [\n", "just text"])
def test_yaml_that_holds_no_settings_is_refused(tmp_path: Path, text: str) -> None:
    """With the file's name."""
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        settings("vllm", "--config", str(path))


def test_a_value_that_is_no_argument_is_refused(tmp_path: Path) -> None:
    """A date, say."""
    path = tmp_path / "file.toml"
    path.write_text("[engines.x]\nseed = 2026-01-01\n")
    with pytest.raises(ConfigError, match=r"table engines\.x: seed = .* use text, a number"):
        settings("vllm", "--config", str(path), "--config-key", "engines.x")


@pytest.mark.parametrize(
    ("flag", "ours", "theirs"),
    [("model", "/a", "/b"), ("served-model-name", "a", "b"), ("chat-template", "a.jinja", "b.jinja")],
)
def test_ours_and_theirs_must_agree(flag: str, ours: str, theirs: str) -> None:
    """Both given and different is an error that names both; the same is fine; one alone counts for both."""
    with pytest.raises(ConfigError, match=rf"--{flag} {ours} contradicts --{flag} {theirs} .*leave one out"):
        settings("vllm", f"--{flag}", ours, "--", f"--{flag}", theirs)
    name = flag.replace("-", "_")
    assert getattr(settings("vllm", f"--{flag}", ours, "--", f"--{flag}={ours}").worker, name) == ours
    assert getattr(settings("vllm", "--", f"--{name}", theirs).worker, name) == theirs


def test_a_first_word_is_the_model() -> None:
    """As in `vllm serve MODEL`."""
    assert settings("vllm", "--", "/models/a", "--seed", "1").worker.model == "/models/a"


def test_vllms_front_has_no_template_here() -> None:
    """It is the edge's, and not passed on to a parser that does not know it."""
    found = settings("vllm", "--", "--chat-template", "t.jinja", "--seed", "1")
    assert (found.worker.chat_template, found.engines.vllm.native) == ("t.jinja", ("--seed", "1"))


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("--tensor-parallel-size", "2"), "tensor_parallel_size", "2"),
        (("--tensor_parallel_size=2",), "tensor_parallel_size", "2"),
        (("-tp", "4", "-tp=8"), "tensor_parallel_size", "8"),
        (("--headless",), "headless", ""),
        (("--headless", "--seed", "1"), "headless", ""),
        (("--model", "--x"), "model", ""),
        (("--modelx", "a"), "model", None),
    ],
)
def test_a_value_is_found_in_each_spelling(words: tuple[str, ...], name: str, value: str | None) -> None:
    """Dashes, underscores, equals signs, short forms; the last one counts."""
    assert native_arguments.value(words, name) == value


def test_a_number_that_is_none_is_named() -> None:
    """Before vLLM is imported."""
    with pytest.raises(EngineUnavailable, match="--node-rank two: use an integer"):
        native_arguments.number(("--node-rank", "two"), "node_rank", 0)


def test_dotted_forms_count_as_the_argument() -> None:
    """`--kv-transfer-config.kv_connector X` gives a transfer configuration as well."""
    assert native_arguments.has(("--kv-transfer-config.kv_connector", "X"), "kv_transfer_config")
    assert not native_arguments.has(("--kv-transfer-configs", "X"), "kv_transfer_config")


def test_other_commands_refuse_an_engines_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router has no engine."""
    monkeypatch.setattr("sys.argv", ["headwater", "router", "--", "--seed", "1"])
    assert cli.main() == 2
    assert "headwater router: takes no engine arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ["engine", "sim", "--", "--seed", "1"],
            "arguments (after `--`) [HEADWATER_NATIVE] is not used by --engine sim: leave it out",
        ),
        (
            ["engine", "sim", "--connector", "nixl"],
            "--connector [HEADWATER_CONNECTOR] is not used by --engine sim: leave it out",
        ),
        (
            ["up", "--engine", "sim", "--handoff-host", "10.0.0.7"],
            "--handoff-host [HEADWATER_HANDOFF_HOST] is not used by --engine sim: leave it out",
        ),
        (
            ["up", "--engine", "tensorrt_llm", "--gpus-per-worker", "2"],
            "--gpus-per-worker [HEADWATER_GPUS_PER_WORKER] is not used by --engine tensorrt_llm: leave it out",
        ),
        (
            ["up", "--engine", "sglang", "--allow", "vulnerable,faults"],
            "--allow faults: --engine sglang refuses nothing of that name; it takes vulnerable",
        ),
        (
            ["engine", "vllm", "--sim-blocks", "64"],
            "--sim-blocks [HEADWATER_SIM_BLOCKS] is not used by --engine vllm: leave it out",
        ),
        (["engine", "sim", "--engine", "vllm"], "contradict each other"),
        (["engine", "sim", "--workers", "2"], "one sim worker per process"),
        (["engine", "vllm", "--chat-template", "/nowhere.jinja"], "--chat-template /nowhere.jinja"),
        (["engine", "vllm", "--role", "prefill", "--", "--headless"], "--role prefill with --headless"),
        (["engine", "vllm", "--role", "prefill", "--connector", "none"], "nixl"),
        pytest.param(
            ["engine", "vllm", "--role", "decode", "--decode-workers", "1"],
            "leave it out",
            marks=pytest.mark.skipif(not vllm_config.installed(), reason="vLLM is not installed"),
        ),
        (["up", "--engine", "sim", "--metrics-port", "65535"], "--metrics-port 65536"),
    ],
)
def test_what_can_not_work_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[Any], wanted: str
) -> None:
    """Through the whole command line, before anything is loaded or connected to."""
    monkeypatch.setattr("sys.argv", ["headwater", *words])
    # It is for a whole process, and would outlive this test.
    monkeypatch.setattr("headwater.engines.logs.configure", lambda *_, **__: None)
    assert cli.main() == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("headwater: ")
    assert wanted in error
