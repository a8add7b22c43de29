"""Which language is spoken in a recording: the model's likeliest language token after the start of a transcript, as Whisper was trained."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from headwater.schemas.hashing import U32
from headwater.schemas.messages.inference import Sampling
from headwater.schemas.tables.card import SpeechSupport

LANGUAGE_AT: Final = -3
"""Place of the language's token in a prompt: the task and the times follow."""


class LanguageDetection(NamedTuple):
    """A prompt of one token whose answer, one token, is a language: id by ISO 639-1 code. It is of the recording's first piece."""

    prompt: U32
    languages: Mapping[str, int]

    @property
    def sampling(self) -> Sampling:
        """The likeliest of the languages."""
        return Sampling(1, temperature=0.0, allowed_token_ids=tuple(sorted(self.languages.values())))

    def language_of(self, token: int) -> str:
        """The code of the language with this token; "" for none."""
        return next((name for name, number in self.languages.items() if number == token), "")


def detection_of(support: SpeechSupport) -> LanguageDetection:
    """For a model that knows several languages."""
    return LanguageDetection(np.array([support.start], np.uint32), support.languages)


def with_language(prompt: U32, token: int) -> U32:
    """The prompt of a piece with the language that was detected."""
    found = prompt.copy()
    found[LANGUAGE_AT] = token
    return found
