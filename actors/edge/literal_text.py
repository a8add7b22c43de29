"""Text of users and tools that spells control tokens, encoded as the text that it is.

A chat template puts control tokens between messages. What stands in a message is somebody's text: `<|im_start|>` in it
must not begin a message. Such spellings are taken out before the template is rendered, marked, and encoded apart from
the rest, as plain characters. Most messages hold none and take the ordinary way.
"""

import re
import secrets
from typing import Any, Final

import numpy as np

from headwater.actors.edge.errors import bad_request
from headwater.actors.edge.tokens import MARK, Tokenizer
from headwater.schemas.hashing import U32

ROLES: Final = frozenset({"user", "tool"})

SPELLINGS_MAX: Final = 4_096


class LiteralText:
    """What was taken out of the messages of one request, in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._taken: list[str] = []
        # Who writes marks into a message cannot know it.
        self._key = secrets.token_hex(8)

    def take_out(self, messages: list[dict[str, Any]]) -> None:
        """Replace spellings of control tokens in what users and tools say by marks."""
        for message in messages:
            content = message.get("content")
            if message.get("role") in ROLES and isinstance(content, str):
                message["content"] = self._marked(content)

    def _marked(self, text: str) -> str:
        control = self._tokenizer.control
        if MARK not in text and not control.may_be_in(text):
            return text
        return control.pattern.sub(self._mark, text)

    def _mark(self, found: re.Match[str]) -> str:
        if len(self._taken) >= SPELLINGS_MAX:
            raise bad_request(
                f"The messages spell more than {SPELLINGS_MAX} control tokens of this model.",
                param="messages",
            )
        self._taken.append(found[0])
        return f"{MARK}{self._key}.{len(self._taken) - 1}{MARK}"

    async def encode(self, text: str, *, add_special_tokens: bool) -> U32:
        """Token ids of the rendered text, with what was taken out as plain characters in its places."""
        if not self._taken:
            return await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        pieces: list[U32] = []
        plain = {spelling: self._tokenizer.encode_plain(spelling) for spelling in set(self._taken)}
        # Text and numbers of marks in turn.
        for position, piece in enumerate(re.split(f"{MARK}{self._key}\\.([0-9]+){MARK}", text)):
            if position % 2:
                pieces.append(plain[self._taken[int(piece)]])
            elif piece or not position:
                special = add_special_tokens and not position
                pieces.append(await self._tokenizer.encode(piece, add_special_tokens=special))
        return np.concatenate(pieces)
