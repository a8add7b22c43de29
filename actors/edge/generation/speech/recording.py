"""A recording that a client wants as text."""

import msgspec


class AudioRecording(msgspec.Struct, frozen=True):
    """The bytes of an audio file, and what to do with it.

    `language` is an ISO 639-1 code, "" if the client did not say. `translates`: into English. `prompt` is text that precedes what is
    said. `timestamps`: the answer has tokens for the times of its segments.
    """

    data: bytes
    language: str = ""
    translates: bool = False
    prompt: str = ""
    timestamps: bool = False
