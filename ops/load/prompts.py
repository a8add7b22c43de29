"""Prompts of a wanted number of tokens, for a model whose tokenizer need not be known.

A prompt is made of words, each from a number: equal numbers are equal text, so prompts begin alike as far as their parts have equal keys. With the
model's tokenizer the words are those that are one token each, after any other. Without it they are common English words, and two
requests that ask for one token find out how many tokens the server counts for them (`Calibration`).
"""

import re
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.trace import mix

_COMMON = """
a about across after against almost along always among and any are around ask at back bad be because been began below
best between big body both box bring but by came can care case change city class close color come could course cut day
did does door down drive each early east eat enough ever every eye fact fall far fast feel field find fire first five
follow food for found four friend from game get girl go good got green ground grow half hand has he head heard heart
help here high his home horse hour house idea in inch is island just kind king land last late leave left let life
light line little live look low make many map may mean men mile mind moon morning most mountain move music my name
need new next no north note number of often on once only open order our out own paper part people perhaps picture plan
plant point power question rain ran read real red right river rock round rule said saw say sea second seem set several
she short should side simple sing six size sleep small snow some song sound space stand start state step stood stop
street study such sure table talk ten than the them then these they think those thought through to together took top
town true try two under up use very wait want war was watch way week well were what wheel where which white whole why
wind without wood work world write yes yet young
"""

COMMON: Final = tuple(_COMMON.split())
"""Words that most vocabularies have as one token."""

WORDS_MIN: Final = 64
"""Distinct words of one token that a tokenizer must have."""

WORDS_MAX: Final = 4_096

PROBE_WORDS: Final = len(COMMON)
"""Words that the first of two probes has once, and the second twice: as often as prompts have them on average."""

_WORD = re.compile(r"[Ġ▁][a-z]{2,}")
"""A word after a space, as byte-level vocabularies and SentencePiece's write it."""


class Calibration(NamedTuple):
    """How a server counts: `fixed` tokens of a chat template or a beginning, and `per_word` for each word.

    `known` False: the server does not count, so a word is taken for a token.
    """

    per_word: float = 1.0
    fixed: float = 0.0
    known: bool = False


def calibration_of(words: int, once: int, twice: int) -> Calibration:
    """What follows from the tokens of `words` words, and of twice as many; -1 where a server does not count."""
    if once < 1 or twice <= once:
        return Calibration()
    per_word = (twice - once) / words
    return Calibration(per_word, max(0.0, once - per_word * words), known=True)


class Part(NamedTuple):
    """A part of a prompt: `tokens` of text that follows from `key`."""

    key: int
    tokens: int


class Words:
    """Makes text. `tokenizer`: the words are one token each in it."""

    def __init__(self, words: tuple[str, ...] = COMMON, tokenizer: Tokenizer | None = None) -> None:
        self._words = np.array([f" {word}" for word in words], object)
        self.tokenizer = tokenizer
        self.calibration = Calibration()

    def text(self, key: int, words: int) -> str:
        """Return this many words, each after a space. The first ones are the same for any number."""
        with np.errstate(over="ignore"):
            seeds = mix(np.array([key], np.uint64)) + np.arange(words, dtype=np.uint64)
        return "".join(self._words[(mix(seeds) % np.uint64(len(self._words))).astype(np.int64)])

    @property
    def probed(self) -> int:
        """Words of the first probe."""
        return min(PROBE_WORDS, len(self._words))

    def probe(self, times: int) -> str:
        """Return the text of a probe."""
        return "".join(self._words[:PROBE_WORDS]) * times

    def prompt(self, parts: "tuple[Part, ...] | list[Part]") -> str:
        """Return text that the server counts as the parts' tokens, together with its fixed ones.

        The fixed tokens are taken from the last part, since the parts before may be shared. A part has at least one word.
        """
        per_word, fixed, _ = self.calibration
        last = len(parts) - 1
        return "".join(
            self.text(part.key, max(1, round((part.tokens - (fixed if at == last else 0)) / per_word)))
            for at, part in enumerate(parts)
        )

    def tokens_of(self, text: str) -> int:
        """Return the number of tokens of a text: exactly with a tokenizer, else as many as the server would count for as many words."""
        if self.tokenizer is not None:
            return len(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return max(1, round(len(text.split()) * self.calibration.per_word))


def words_of(folder: str) -> Words:
    """The words of a model's tokenizer. Raises `ConfigError` for a folder without one, or one with few such words."""
    path = Path(folder)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    # The library raises this class for a file that is missing, and for one it cannot read.
    except Exception as error:
        raise ConfigError(f"--tokenizer {folder}: {file}: {error}") from error
    candidates = sorted({word[1:] for word in tokenizer.get_vocab() if _WORD.fullmatch(word)})
    before = len(tokenizer.encode(" the", add_special_tokens=False).ids)
    pairs = tokenizer.encode_batch([f" the {word}" for word in candidates], add_special_tokens=False)
    found = [word for word, pair in zip(candidates, pairs, strict=True) if len(pair.ids) == before + 1]
    if len(found) < WORDS_MIN:
        raise ConfigError(
            f"--tokenizer {folder}: only {len(found)} words are one token in it; leave it out, and words are counted by the server"
        )
    step = max(1, len(found) // WORDS_MAX)
    return Words(tuple(found[::step][:WORDS_MAX]), tokenizer)
