"""What is looked at in a model's folder before an engine loads it: each fault is one line, and costs no minute.

The chat template is tried in a process of its own, with bounds on time and memory: it is a program that comes with the
model, and an edge renders it on its event loop.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import tokenizers

from headwater.engines.engine import EngineUnavailable
from headwater.engines.model_files import ModelFiles

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
INDEX: Final = "model.safetensors.index.json"
HEADER_BYTES_MAX: Final = 100 * 1024 * 1024

TRIAL_S: Final = 5.0
TRIAL_CPU_S: Final = 3
TRIAL_BYTES: Final = 1 << 30
ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Libraries of linear algebra reserve memory for each core when they are imported: with 32 cores more than the bound."""

TRIAL_TEXT_MAX: Final = 1 << 20
"""Characters that a template may make of a trial's few words."""

MESSAGES: Final = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Where does a river begin?"},
]

_TRIAL: Final = """
import json, sys
import jinja2
from headwater.actors.http.errors import ApiError
from headwater.actors.edge.model.chat_template import ChatTemplate
given = json.load(sys.stdin)
template = ChatTemplate(given["template"], given["special"])
try:
    print(len(template.render(given["messages"])))
except ApiError as error:
    # A template may refuse what a trial says, by an exception of its own; any other is its mistake.
    cause = error.__cause__
    if not isinstance(cause, jinja2.TemplateError):
        sys.exit(f"{type(cause).__name__}: {cause}")
    print(0)
"""


def check(folder: Path, files: ModelFiles, *, weights: bool) -> None:
    """Raises `EngineUnavailable` naming the file at fault. `weights`: an engine is to load them."""
    if weights and not (folder / "config.json").is_file():
        raise EngineUnavailable(
            f"{folder} has no config.json: give --model a folder in Hugging Face's layout"
        )
    try:
        tokenizers.Tokenizer.from_buffer(files.tokenizer)
    except Exception as error:  # the library raises bare exceptions
        raise EngineUnavailable(f"{folder / 'tokenizer.json'} is not usable: {error}") from error
    if weights:
        _check_weights(folder)
    if files.chat_template:
        check_template(files.chat_template, files.special_tokens, str(folder))


def check_template(template: str, special_tokens: dict[str, str], where: str) -> None:
    """Render a template once, within bounds. Raises `EngineUnavailable`."""
    given = json.dumps({"template": template, "special": special_tokens, "messages": MESSAGES})
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL],
            input=given,
            capture_output=True,
            text=True,
            timeout=TRIAL_S * 4,
            check=False,
            preexec_fn=_bound,
            env={**os.environ, **ONE_THREAD},
        )
    except subprocess.TimeoutExpired:
        raise _bad_template(where, f"it did not end within {TRIAL_S * 4:.0f} s") from None
    if done.returncode < 0 or "MemoryError" in done.stderr:
        bounds = f"{TRIAL_CPU_S} s of processor time and {TRIAL_BYTES >> 20} MiB"
        raise _bad_template(where, f"three short messages take it more than {bounds}")
    if done.returncode:
        raise _bad_template(where, (done.stderr.strip().splitlines() or ["it failed"])[-1])
    if int(done.stdout) > TRIAL_TEXT_MAX:
        raise _bad_template(where, f"it makes {done.stdout.strip()} characters of three short messages")


def _bound() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))


def _bad_template(where: str, why: str) -> EngineUnavailable:
    return EngineUnavailable(
        f"the chat template of {where} is not usable: {why}; give another with --chat-template"
    )


def _check_weights(folder: Path) -> None:
    found = [path for pattern in WEIGHTS for path in sorted(folder.glob(pattern))]
    if not found:
        raise EngineUnavailable(f"{folder} has no weights: no *.safetensors, nor any other format")
    index = folder / INDEX
    if index.is_file():
        shards = set(_json(index).get("weight_map", {}).values())
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            raise EngineUnavailable(f"{folder} has no {missing[0]}, which {INDEX} names")
    for path in found:
        if path.suffix == ".safetensors":
            _check_safetensors(path)


def _check_safetensors(path: Path) -> None:
    """Is the file as long as its header says?"""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(HEADER_BYTES_MAX, size):
            raise EngineUnavailable(f"{path} is no safetensors file, or cut off in its header")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            end = max(
                (int(one["data_offsets"][1]) for name, one in header.items() if name != "__metadata__"),
                default=0,
            )
        except (ValueError, KeyError, TypeError, IndexError, UnicodeDecodeError) as error:
            raise EngineUnavailable(f"{path} has a header that cannot be read: {error}") from error
    if size < 8 + length + end:
        raise EngineUnavailable(
            f"{path} is cut off: it has {size} bytes, its header describes {8 + length + end}"
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise EngineUnavailable(f"{path} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}
