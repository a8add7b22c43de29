"""Log lines of processes that share one stream: each is written whole, and is a JSON object, whoever logs it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.engines import logs
from headwater.engines.vllm import config as vllm_config
from headwater.ops.start.children import child_environment

OWN = """
import structlog
from headwater.engines.logs import configure
configure("info", "json", kind="worker", worker="w1")
log = structlog.get_logger("headwater.test")
log.debug("zeroth")
log.info("first", number=1)
log.warning("second", text="two\\nlines")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("third")
"""

OTHERS = """
import logging, threading, warnings
from headwater.engines.logs import configure, follow
configure("debug", "json", kind="worker", worker="w1")
follow("engine")
library = logging.getLogger("transformers")
library.addHandler(logging.StreamHandler())
library.propagate = False
library.warning("of %s", "transformers")
logging.getLogger("library").info("not shown: libraries warn")
logging.getLogger("library").warning("of a library")
logging.getLogger("engine.core").debug("of an engine")
warnings.warn("a warning", stacklevel=1)
def fail():
    raise ValueError("in a thread")
thread = threading.Thread(target=fail, name="own")
thread.start()
thread.join()
raise ValueError("at the end")
"""

FIELDS = ["timestamp", "level", "logger", "event", "kind", "pid"]


def written(program: str, *, code: int = 0, **environ: str) -> list[bytes]:
    """What a process wrote to standard error, one entry for each call: the socket keeps them apart."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(20)
        done = subprocess.run(
            [sys.executable, "-c", program],
            stderr=theirs.fileno(),
            env=child_environment() | environ,
            timeout=60,
            check=False,
        )
        theirs.close()
        parts = []
        while part := ours.recv(1 << 16):
            parts.append(part)
        assert done.returncode == code, parts
        return parts


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_each_line_is_one_write(unbuffered: str) -> None:
    """Or the lines of two processes mix. Container images set PYTHONUNBUFFERED, and then each write counts."""
    parts = written(OWN, PYTHONUNBUFFERED=unbuffered)
    assert [part.count(b"\n") for part in parts] == [1] * len(parts)
    assert all(part.endswith(b"\n") for part in parts)
    lines = [json.loads(part) for part in parts]
    assert [one["event"] for one in lines] == ["first", "second", "third"]
    assert all([*one][:6] == FIELDS for one in lines)
    assert all(
        (one["kind"], one["worker"], one["logger"]) == ("worker", "w1", "headwater.test") for one in lines
    )
    assert lines[1]["text"] == "two\nlines"
    assert lines[2]["exception"][0]["exc_type"] == "ZeroDivisionError"


def test_what_others_log_has_the_same_form() -> None:
    """The standard library's records, a library with a handler of its own, warnings, and exceptions that nobody handles."""
    lines = [json.loads(part) for part in written(OTHERS, code=1)]
    assert all([*one][:6] == FIELDS and one["worker"] == "w1" for one in lines)
    assert [(one["logger"], one["level"]) for one in lines] == [
        ("transformers", "warning"),
        ("library", "warning"),
        ("engine.core", "debug"),
        ("py.warnings", "warning"),
        ("headwater.process", "error"),
        ("headwater.process", "critical"),
    ]
    assert [one["event"] for one in lines[:3]] == ["of transformers", "of a library", "of an engine"]
    assert (lines[4]["event"], lines[4]["thread"]) == ("thread_failed", "own")
    assert (lines[5]["event"], lines[5]["reason"]) == ("process_failed", "ValueError: at the end")


def test_a_process_that_an_engine_spawns_logs_as_the_one_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has nothing but a file for `dictConfig`, which SGLang and vLLM read in each of their processes."""
    monkeypatch.setattr(logs, "_level", "debug")
    monkeypatch.setattr(logs, "_format", "json")
    monkeypatch.setattr(logs, "_fields", {"kind": "worker", "worker": "w1"})
    path = logs.write_config(tmp_path, {"engine": "debug", "engine.chatty": "warning"})
    program = f"""
import json, logging, logging.config
logging.config.dictConfig(json.load(open({str(path)!r})))
logging.getLogger("engine").debug("shown")
logging.getLogger("engine.chatty").info("not shown")
logging.getLogger("library").info("not shown")
"""
    (line,) = [json.loads(part) for part in written(program)]
    assert (line["event"], line["logger"], line["kind"], line["worker"]) == (
        "shown",
        "engine",
        "worker",
        "w1",
    )


def test_what_changes_is_read_when_a_line_is_written_and_an_attempt_names_its_request() -> None:
    """A router's position; a worker's pool, which it knows once its engine has started."""
    event: dict[str, Any] = {
        "log_position": lambda: 7,
        "pool": lambda: "",
        "attempt": "chatcmpl-6b09-0-1-e0-2",
    }
    done = logs._complete(None, "info", event)
    assert (done["log_position"], done["request"]) == (7, "chatcmpl-6b09")
    assert "pool" not in done
    assert done["pid"] == os.getpid()


@pytest.mark.parametrize(
    "line", [b'{"event": "x"', b'{"a": 1}', b"[1]", b"text", b"", b'{"event": "x"} and more']
)
def test_what_only_looks_like_a_line_is_none(line: bytes) -> None:
    """It is passed on as text."""
    assert logs.is_line(b'{"event": "x"}')
    assert not logs.is_line(line)


def test_libraries_are_left_alone_where_headwater_is_one_itself() -> None:
    """Nothing is configured by an import: a program that uses an adapter logs as it likes."""
    program = (
        "import logging, headwater.engines.logs as logs\n"
        "assert not logs.is_configured() and not logging.getLogger().handlers"
    )
    assert written(program) == []


def test_what_is_simulated_logs_nothing() -> None:
    """Its routers diverge and its disks fill up, which is no operator's concern."""
    program = (
        "import structlog\n"
        "from headwater.engines import logs\n"
        "logs.silence()\n"
        "structlog.get_logger('headwater.router').critical('routers_diverged')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


@pytest.mark.parametrize(
    ("given", "own", "taken"),
    [
        ("", True, True),
        ("/etc/vllm/logging.json", True, False),
        # Of the process that started this one.
        ("/run/headwater-engine-1/logging.json", True, True),
        ("", False, False),
    ],
)
def test_an_engines_processes_log_as_theirs_does(
    given: str, own: bool, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the operator has configured them, or this process logs as a program of somebody else's does."""
    monkeypatch.setattr(logs, "is_configured", lambda: own)
    # Of a process that forks vLLM.
    monkeypatch.delenv("VLLM_CONFIGURE_LOGGING", raising=False)
    monkeypatch.setenv(vllm_config.LOG_CONFIG, given)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    vllm_config.log_as_this_process(tmp_path)
    found = os.environ[vllm_config.LOG_CONFIG]
    assert Path(found).is_relative_to(tmp_path) if taken else found == given
    assert os.environ.get("VLLM_LOGGING_LEVEL") == (logs.level().upper() if taken else None)
