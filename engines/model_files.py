"""The files of a model's folder that prompts need: tokenizer, chat template, special tokens, limits, settings of the media processor."""

import hashlib
import json
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headwater.engines.engine import EngineUnavailable

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")

SAMPLES_MAX: Final = 1_024
SAMPLE_BYTES: Final = 4_096
"""Weights are sampled: at most this many pieces of this size, spread evenly over all of them."""

HEADER_BYTES_MAX: Final = 1 << 20
"""Read from the beginning of each file of weights: names, types and shapes of its tensors."""


def model_digest(model: str) -> str:
    """Digest over a model's path, configuration and weights. Files of the same names and sizes are assumed to be equal."""
    digest = blake2b(model.encode(), digest_size=6)
    folder = Path(model)
    if (folder / "config.json").is_file():
        digest.update((folder / "config.json").read_bytes())
    for pattern in _WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()


def content_digest(folder: Path) -> str:
    """Return what a model is: SHA-256, in hex, over its configuration, its tokenizer and its weights, and not over its path or its templates.

    Of weights it reads names, sizes, headers and samples, some megabytes in all. A change between two samples is not seen; fine-tuning
    changes nearly every value.
    """
    digest = sha256()
    try:
        # However it is written.
        config = json.dumps(json.loads((folder / "config.json").read_bytes()), sort_keys=True)
    except (OSError, ValueError):
        config = ""
    digest.update(f"{config}\n".encode())
    tokenizer = folder / "tokenizer.json"
    digest.update(sha256(tokenizer.read_bytes()).digest() if tokenizer.is_file() else b"")
    files = sorted({path for pattern in _WEIGHTS for path in folder.rglob(pattern) if path.is_file()})
    step = max(SAMPLE_BYTES, sum(path.stat().st_size for path in files) // SAMPLES_MAX)
    for path in files:
        size = path.stat().st_size
        digest.update(f"\n{path.relative_to(folder)} {size}\n".encode(errors="surrogateescape"))
        with path.open("rb") as file:
            digest.update(file.read(HEADER_BYTES_MAX))
            for at in range(0, size, step):
                file.seek(at)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


# Reading the files.

CONTEXT_LENGTH: Final = 4096
"""Of a model whose configuration does not say."""

PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

CODED: Final = {
    "deepseek_v32": "deepseek_v32.jinja",
    "deepseek_v4": "deepseek_v4.jinja",
}
"""Templates of ours by `model_type`, for models that are published with a program in place of a chat template."""

TOOL_USE: Final = "tool_use"
"""The name of a model's template for requests with tools, where it has one of its own for these."""


class ModelFiles(NamedTuple):
    """The parts of a model that an edge uses. `chat_template` is empty for a base model.

    `vocabulary` is how many logits the model has, 0 if its configuration does not say. `response_template` is the JSON text of
    what `tokenizer_config.json` says about parsing answers, "" if nothing. `media_processor` is a digest of the settings with
    which the model's processor turns media into its input, "" without such files.
    """

    tokenizer: bytes
    chat_template: str
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    context_length: int
    name: str
    response_template: str = ""
    vocabulary: int = 0
    media_processor: str = ""
    identity: str = ""


NO_FILES: Final = ModelFiles(b"", "", {}, (), CONTEXT_LENGTH, "")
"""Those of a model whose folder nobody has read."""


def read_model_files(folder: Path) -> ModelFiles:
    """Read a Hugging Face model folder. Raises `EngineUnavailable` naming the missing file."""
    if not folder.is_dir():
        raise EngineUnavailable(f"{folder} is not a folder")
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise EngineUnavailable(
            f"{folder} has no tokenizer.json: give --model a folder in Hugging Face's layout "
            "with a fast tokenizer"
        )
    settings = _json(folder / "tokenizer_config.json")
    config = _json(folder / "config.json")
    generation = _json(folder / "generation_config.json")
    special = {name: text for name in SPECIAL_TOKENS if (text := _token_text(settings.get(name)))}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    return ModelFiles(
        tokenizer.read_bytes(),
        _template(folder, settings) or coded_template(str(config.get("model_type", ""))),
        special,
        tuple(eos) if isinstance(eos, list) else (eos,) if isinstance(eos, int) else (),
        int(config.get("max_position_embeddings", CONTEXT_LENGTH)),
        folder.name,
        json.dumps(template) if isinstance(template := settings.get("response_template"), dict) else "",
        int(config.get("vocab_size", 0)),
        _media_processor(folder),
        content_digest(folder),
    )


def _media_processor(folder: Path) -> str:
    """See `ModelFiles`. How a file is written, and the order of its fields, make no difference."""
    by_name = {name: settings for name in PROCESSOR_FILES if (settings := _json(folder / name))}
    return hashlib.sha256(json.dumps(by_name, sort_keys=True).encode()).hexdigest() if by_name else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise EngineUnavailable(f"{path} is not JSON: {error}") from error
    return document if isinstance(document, dict) else {}


def _template(folder: Path, settings: dict[str, Any]) -> str:
    """Newer models have the template in a separate file, models with a processor of media in one of JSON; some have several: one named
    `default`, and one for requests with tools.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        tools = folder / "additional_chat_templates" / f"{TOOL_USE}.jinja"
        return _either(path.read_text(), tools.read_text() if tools.is_file() else "")
    template = (
        _json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template") or ""
    )
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return _either(str(named.get("default", "")), str(named.get(TOOL_USE, "")))
    return str(template)


def coded_template(model_type: str) -> str:
    """The chat template that stands for the program of a model's folder, "" where there is none of ours."""
    name = CODED.get(model_type)
    return (Path(__file__).parent / "chat_templates" / name).read_text() if name else ""


def _either(default: str, with_tools: str) -> str:
    """One template that is the one or the other."""
    if default and with_tools:
        # The line ends belong to the tags: nothing is added to either.
        return f"{{% if tools %}}\n{with_tools}{{% else %}}\n{default}{{% endif %}}"
    return default or with_tools


def _token_text(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("content") or "")
    return value if isinstance(value, str) else ""


def read_chat_template(path: str) -> str:
    """The chat template in this file."""
    try:
        text = Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise EngineUnavailable(
            f"--chat-template {path}: {reason}. Use a readable Jinja file, or omit it for the model's own"
        ) from error
    if not text.strip():
        raise EngineUnavailable(f"--chat-template {path}: the file is empty. Omit it for the model's own")
    return text


# A model with a token per byte, for engines that load none.

BYTE_CONTEXT_LENGTH = 131_072
EOS = "<|im_end|>"
IMAGE, VIDEO, AUDIO = "<|image|>", "<|video|>", "<|audio|>"

BYTE_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] or [] %}"
    "{{ part['text'] if part['type'] == 'text' else '<|' + part['type'] + '|>' }}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and the control tokens of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: number for number, piece in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True)
            for text in ("<|endoftext|>", "<|im_start|>", EOS, IMAGE, VIDEO, AUDIO)
        ]
    )
    return tokenizer


def byte_model_files(name: str) -> ModelFiles:
    """The files of that model under this name."""
    tokenizer = byte_tokenizer()
    return ModelFiles(
        tokenizer.to_str().encode(),
        BYTE_TEMPLATE,
        {"bos_token": "<|im_start|>", "eos_token": EOS},
        tuple(number for text in (EOS,) if (number := tokenizer.token_to_id(text)) is not None),
        BYTE_CONTEXT_LENGTH,
        name,
        identity=hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
    )


# The folder of a pipeline in diffusers' layout.

PIPELINE_INDEX: Final = "model_index.json"
PIPELINE_TOKENIZERS: Final = ("tokenizer", "tokenizer_2", "tokenizer_3")


def pipeline_folder(model: str) -> Path:
    """The folder that `--model` names. Raises `EngineUnavailable`."""
    folder = Path(model).expanduser()
    if not model or not (folder / PIPELINE_INDEX).is_file():
        raise EngineUnavailable(
            f"this engine needs --model with a pipeline's folder in diffusers' layout; {model or 'none'} has no {PIPELINE_INDEX}"
        )
    return folder


def _tokenizer_of(folder: Path) -> bytes:
    """The tokenizer.json of the pipeline's first fast tokenizer, b"" if it has none."""
    for part in PIPELINE_TOKENIZERS:
        path = folder / part / "tokenizer.json"
        if path.is_file():
            return path.read_bytes()
    return b""


def read_pipeline_files(model: str, name: str) -> ModelFiles:
    """What an edge needs of the pipeline in the folder `model`; `name` is its name for clients, "": the folder's. Raises `EngineUnavailable`."""
    folder = pipeline_folder(model)
    # The edge only counts prompts: the pipeline encodes them itself. Without a fast tokenizer, by bytes.
    files = byte_model_files(name or folder.name)
    return files._replace(
        tokenizer=_tokenizer_of(folder) or files.tokenizer,
        chat_template="",
        special_tokens={},
        eos_token_ids=(),
        identity=content_digest(folder),
    )
