"""Small vocabularies of the kinds that models have, and real ones that packages carry."""

import base64
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

import mistral_common
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Reference

from headwater.actors.edge.tokenizer import Tokenizer, _unicode_to_byte
from headwater.ops.start import model

MISTRAL_DATA: Final = Path(mistral_common.__file__).parent / "data"
CONTROL: Final = ("<s>", "</s>")
WORDS: Final = ("Hello", "▁Hello", "▁world", "world", "▁ok", "ok", "▁▁", "é")
FIRST_BYTE: Final = 3
"""The id of <0x00>."""

REAL: Final = ("llama2", "gemma3", "qwen3", "gptoss", "deepseek")
"""Folders of `make tokenizers`."""


def fallback(*, strips: bool) -> Reference:
    """As SentencePiece's models are: words, and `<0xNN>` for bytes of characters that are none.

    `strips`: the first space of a decoded text is left out, as Llama 2 and Mistral 7B have it; otherwise as Gemma does.
    """
    pieces = ["<unk>", *CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Hellowrdk", *WORDS]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    made = Reference(models.BPE(vocab=vocabulary, merges=_merges(), byte_fallback=True, unk_token="<unk>"))
    replace = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strips else replace
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", *CONTROL)])
    return made


def _merges() -> list[tuple[str, str]]:
    """Of nothing: the pieces are met by their ids."""
    return []


@cache
def small(name: str) -> Tokenizer:
    """`strips`, `keeps`: both kinds with byte fallback; `smollm2`: SmolLM2's, of bytes."""
    if name == "smollm2":
        return Tokenizer((model.ensure() / "tokenizer.json").read_bytes(), (2,))
    return Tokenizer(fallback(strips=name == "strips").to_str().encode())


@cache
def real(folder: Path, name: str) -> Tokenizer:
    """A real vocabulary."""
    return Tokenizer((folder / name / "tokenizer.json").read_bytes())


def names_of(folder: Path) -> list[str]:
    """The real vocabularies that are there."""
    return [name for name in REAL if (folder / name / "tokenizer.json").is_file()]


def settings(folder: Path, name: str) -> dict[str, Any]:
    """A vocabulary's settings."""
    document: dict[str, Any] = json.loads((folder / name / "tokenizer_config.json").read_text())
    return document


def number(tokenizer: Tokenizer, piece: str) -> int:
    """The id of a piece."""
    found = tokenizer.reference.token_to_id(piece)
    assert found is not None, piece
    return int(found)


def byte(tokenizer: Tokenizer, value: int) -> int:
    """The id of the token that is one byte of a character."""
    return number(tokenizer, f"<0x{value:02X}>")


def write_o200k(tokenizer: Path) -> Path:
    """A folder with o200k_base.tiktoken: the ranks of tokens are their ids."""
    to_byte = _unicode_to_byte()
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    lines = [
        base64.b64encode(bytes(to_byte[character] for character in token)).decode() + f" {rank}\n"
        for token, rank in sorted(vocabulary.items(), key=lambda item: item[1])
        if rank < 199_998
    ]
    folder = Path(tempfile.mkdtemp())
    (folder / "o200k_base.tiktoken").write_text("".join(lines))
    return folder
