"""Translation of text to token ids and back, and the search for control tokens in text.

Encoding: fastokens where it agrees with the model's tokenizer on a probe, else Hugging Face's tokenizers through
`async_encode`, which frees the GIL (its plain `encode` holds it: a 100 k-token prompt would stop every
stream for a third of a second). Decoding: a table from token id to bytes, made once and checked against the
tokenizer; if that fails, the tokenizer's own incremental decoder.

Control tokens are found by a compiled kernel. A regular expression takes up to 130 ms for a megabyte of HTML and holds the
interpreter's lock, so every stream would wait. The kernel takes about a millisecond, without the lock.
"""

import asyncio
import itertools
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import fastokens
import msgspec
import numpy as np
import structlog
import tokenizers
from numpy.typing import NDArray

from headwater.schemas.hashing import U8, U32
from headwater.schemas.jit import kernel

I64 = NDArray[np.int64]

MARK = "\U0010fffd"
"""A private-use character with which `headwater.actors.edge.chat_template` marks control tokens."""

SHORT_CHARACTERS: Final = 4_096
"""Texts up to this size are searched by the regular expression, in less than a millisecond."""


class ControlTokens:
    """The spellings of control tokens, and `MARK`. At each place the longest one counts."""

    def __init__(self, spellings: Iterable[str]) -> None:
        ordered = [*sorted(set(spellings) - {""}, key=len, reverse=True), MARK]
        self._pattern = re.compile("(" + "|".join(map(re.escape, ordered)) + ")")
        encoded = [spelling.encode() for spelling in ordered]
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)
        self._ends = np.cumsum([len(raw) for raw in encoded], dtype=np.int64)
        self._begins_with = np.zeros(1 << 16, np.uint8)
        for raw in encoded:
            seconds = raw[1:2] or bytes(range(256))
            self._begins_with[[raw[0] << 8 | second for second in seconds]] = 1

    def split(self, text: str, most: int) -> list[str]:
        """Text and spellings in turns: a text first and last. At most about `most` spellings are found."""
        if len(text) <= SHORT_CHARACTERS:
            return self._pattern.split(text)
        data = text.encode("utf-8", "surrogatepass")
        spans = np.empty((most, 2), np.int64)
        count = find_spellings(
            np.frombuffer(data, np.uint8), self._bytes, self._ends, self._begins_with, spans
        )
        if not count:
            return [text]
        pieces: list[str] = []
        done = 0
        for begin, end in spans[:count].tolist():
            pieces += [data[done:begin].decode("utf-8", "surrogatepass"), data[begin:end].decode()]
            done = end
        return [*pieces, data[done:].decode("utf-8", "surrogatepass")]


@kernel
def find_spellings(data: U8, spellings: U8, ends: I64, begins_with: U8, spans: I64) -> int:
    """Write begin and end of each spelling to `spans`, until that is full; returns their number.

    `spellings` are the bytes of all, longest first, with their `ends`. `begins_with`, of shape (65536,), says which two
    bytes begin one.
    """
    count = at = 0
    size = len(data)
    while at < size and count < len(spans):
        second = data[at + 1] if at + 1 < size else 0
        length = 0
        if begins_with[data[at] * 256 + second]:
            first = 0
            for last in ends:
                spelling_size = last - first
                if spelling_size <= size - at:
                    same = 0
                    while same < spelling_size and data[at + same] == spellings[first + same]:
                        same += 1
                    if same == spelling_size:
                        length = spelling_size
                        break
                first = last
        if length:
            spans[count, 0] = at
            spans[count, 1] = at + length
            count += 1
            at += length
        else:
            at += 1
    return count


# Encoding and decoding.

TOKEN_BYTES_MAX = 128
"""Assumed bytes of the longest token without a byte table: runs of spaces are the longest in known tokenizers."""

PROMPT_TAIL = 6
"""Tokens of a prompt that are decoded with its answer's first ones."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

REPLACEMENT = "\ufffd"

INLINE_CHARACTERS_MAX = 8_192
"""Longer texts are encoded off the event loop."""

PROBES = (
    "The quick brown fox — jumps over 13 lazy dogs.\n\n\tEnd.",
    "def f(x):\n    return x ** 2  # ½ “quoted” naïve café",
    "漢字とかな 한국어 العربية עברית 🙂👩‍👩‍👧‍👦 \x00\x7f",
    "   leading, trailing   ",
)

_log = structlog.get_logger("headwater.tokens")


class TokenTable(msgspec.Struct, frozen=True):
    """Bytes of each token id; special tokens have none."""

    pieces: list[bytes]


class Tokenizer:
    """One model's tokenizer, from the bytes of its tokenizer.json."""

    def __init__(self, data: bytes, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.reference: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(data)
        self.reference.no_padding()
        self.reference.no_truncation()
        self._fast: Any = _fast_if_equal(data, self.reference)
        self.vocabulary = self.reference.get_vocab_size(with_added_tokens=True)
        self.table = _table_if_equal(data, self.reference, self.vocabulary)
        self.special = frozenset(
            number for number, token in self.reference.get_added_tokens_decoder().items() if token.special
        ) | set(eos_token_ids)
        self.control = ControlTokens(
            token.content for token in self.reference.get_added_tokens_decoder().values() if token.special
        )
        self._plain: tokenizers.Tokenizer | None = None
        self._ends = frozenset(eos_token_ids)
        self._spelled: TokenTable | None = None
        self._data = data
        self._has_bytes = b'"ByteFallback"' in data
        self._anchor: list[int] = list(self.reference.encode("a", add_special_tokens=False).ids)
        spelled = [token.content.encode() for token in self.reference.get_added_tokens_decoder().values()]
        self.token_bytes_max = (
            max((len(piece) for piece in [*self.table.pieces, *spelled]), default=TOKEN_BYTES_MAX)
            if self.table
            else TOKEN_BYTES_MAX
        )

    def encode_plain(self, text: str) -> U32:
        """Token ids of a short text in which nothing is a control token."""
        if self._plain is None:
            self._plain = tokenizers.Tokenizer.from_buffer(self._data)
            self._plain.encode_special_tokens = True
        return np.array(self._plain.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    async def encode(self, text: str, *, add_special_tokens: bool) -> U32:
        """Token ids of `text`, uint32 of shape (n,)."""
        if self._fast is not None:
            try:
                if len(text) <= INLINE_CHARACTERS_MAX:
                    ids = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
                    return np.array(ids, dtype=np.uint32)
                return await asyncio.to_thread(_encode_flat, self._fast, text, add_special_tokens)
            except ValueError:
                # It rejects bytes that the vocabulary lacks; the reference implementation encodes them.
                pass
        ids = (await self.reference.async_encode(text, add_special_tokens=add_special_tokens)).ids
        return np.array(ids, dtype=np.uint32)

    async def encode_pair(self, first: str, second: str) -> tuple[U32, int]:
        """Token ids of two texts as one input, and the index where the type ids become 1 (0: nowhere)."""
        encoding = await self.reference.async_encode(first, second, add_special_tokens=True)
        segment = encoding.type_ids.index(1) if 1 in encoding.type_ids else 0
        return np.array(encoding.ids, dtype=np.uint32), segment

    def text_of(self, token: int) -> str:
        """The text of one token in log probabilities: U+FFFD where it is part of a character."""
        if token in self.special:
            return self.reference.id_to_token(token) or ""
        return self.bytes_of(token).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> bytes:
        """Bytes of one token; of a special one, its name."""
        if token in self.special:
            return (self.reference.id_to_token(token) or "").encode()
        if self.table is not None and token < len(self.table.pieces):
            return self.table.pieces[token]
        part = _BYTE.fullmatch(self.reference.id_to_token(token) or "") if self._has_bytes else None
        if part is not None:
            return bytes([int(part[1], 16)])
        # Behind another token: alone, or at the beginning of a text, it may lose its space.
        before = self.reference.decode(self._anchor, skip_special_tokens=False)
        text = self.reference.decode([*self._anchor, token], skip_special_tokens=False)
        return text.removeprefix(before).encode()

    def decoder(self, *, special: bool = False, prompt: Sequence[int] | U32 = ()) -> "Decoder":
        """A new incremental decoder for one answer. `special`: it spells out special tokens, except those that end it.

        `prompt` are tokens that the answer continues: its first token has a space where it has one inside of a text.
        """
        if self.table is None:
            left_out = frozenset(self._ends) if special else None
            return StreamDecoder(self.reference, left_out, self._tail(prompt))
        if not special:
            return TableDecoder(self.table, self.special)
        if self._spelled is None:
            pieces = list(self.table.pieces)
            for token in self.special:
                if token < len(pieces):
                    pieces[token] = self.bytes_of(token)
            self._spelled = TokenTable(pieces)
        return TableDecoder(self._spelled, self._ends)

    def _tail(self, prompt: Sequence[int] | U32) -> list[int]:
        """The last tokens of a prompt, behind its last special one: behind that a text begins."""
        tail: list[int] = []
        for token in reversed(prompt[-PROMPT_TAIL:]):
            if token in self.special:
                break
            tail.insert(0, int(token))
        return tail


class Decoder(Protocol):
    """Token ids in, text out; only whole characters."""

    def push(self, tokens: tuple[int, ...]) -> str:
        """Text that these tokens complete."""
        ...

    def flush(self) -> str:
        """The rest at the end: incomplete bytes as U+FFFD."""
        ...


class TableDecoder:
    """Decoder over a `TokenTable`. Special tokens are left out."""

    __slots__ = ("_pending", "_pieces", "_special")

    def __init__(self, table: TokenTable, special: frozenset[int]) -> None:
        self._pieces = table.pieces
        self._special = special
        self._pending = b""

    def push(self, tokens: tuple[int, ...]) -> str:
        """See `Decoder.push`."""
        pieces, special = self._pieces, self._special
        count = len(pieces)
        if len(tokens) == 1:
            # As in most frames of a stream.
            token = tokens[0]
            data = self._pending + (pieces[token] if token not in special and token < count else b"")
        else:
            data = self._pending + b"".join(
                [pieces[token] for token in tokens if token not in special and token < count]
            )
        try:
            text = data.decode()
            self._pending = b""
            return text
        except UnicodeDecodeError:
            pass
        complete_length = _whole_characters(data)
        self._pending = data[complete_length:]
        return data[:complete_length].decode("utf-8", "replace")

    def flush(self) -> str:
        """See `Decoder.flush`."""
        rest, self._pending = self._pending, b""
        return rest.decode("utf-8", "replace")


class StreamDecoder:
    """Decoder for vocabularies without a byte table: decodes a short window with each token.

    A token's text is the difference of two decodings that begin at the same earlier token, so that pieces which
    decode differently at the start of a text (a leading space) come out as they do inside of it. Special tokens are left
    out; with `left_out`, only those in it.
    """

    __slots__ = ("_begin", "_ids", "_left_out", "_reference", "_shown")

    def __init__(
        self,
        reference: tokenizers.Tokenizer,
        left_out: frozenset[int] | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self._reference = reference
        self._left_out = left_out
        self._ids: list[int] = list(prompt)
        self._begin = 0
        self._shown = len(self._ids)

    def push(self, tokens: tuple[int, ...]) -> str:
        """See `Decoder.push`."""
        parts: list[str] = []
        for token in tokens:
            if self._left_out is not None and token in self._left_out:
                continue
            self._ids.append(token)
            before, now = self._texts()
            if len(now) > len(before) and not now.endswith(REPLACEMENT):
                parts.append(now[len(before) :])
                self._begin, self._shown = self._shown, len(self._ids)
        return "".join(parts)

    def flush(self) -> str:
        """See `Decoder.flush`."""
        before, now = self._texts()
        self._begin = self._shown = len(self._ids)
        return now[len(before) :]

    def _texts(self) -> tuple[str, str]:
        """The window decoded up to the text that was emitted, and up to the newest token."""
        decode, skip = self._reference.decode, self._left_out is None
        shown = self._ids[self._begin : self._shown]
        return decode(shown, skip_special_tokens=skip), decode(
            self._ids[self._begin :], skip_special_tokens=skip
        )


def _whole_characters(data: bytes) -> int:
    """Length of the part of `data` that does not end inside a character."""
    for back in range(1, min(4, len(data)) + 1):
        lead = data[-back]
        if lead & 0xC0 == 0x80:
            continue
        need = 2 if lead & 0xE0 == 0xC0 else 3 if lead & 0xF0 == 0xE0 else 4 if lead & 0xF8 == 0xF0 else 1
        return len(data) - back if need > back else len(data)
    return len(data)


def _encode_flat(fast: Any, text: str, add_special_tokens: bool) -> U32:
    """Encode without an object for each token: the list of 128 k ids would hold the GIL for 10 ms."""
    ids, _ = fast.encode_batch_flat([text], add_special_tokens=add_special_tokens)
    return np.frombuffer(ids, "<u4")


def _fast_if_equal(data: bytes, reference: tokenizers.Tokenizer) -> Any:
    try:
        fast = fastokens.Tokenizer.from_json_str(data.decode())
        for probe, special in itertools.product(PROBES, (False, True)):
            encoded = fast.encode(probe, add_special_tokens=special).ids
            expected = reference.encode(probe, add_special_tokens=special).ids
            if list(encoded) != expected or _encode_flat(fast, probe, special).tolist() != expected:
                raise ValueError(f"it encodes {probe[:20]!r} differently")
    except Exception as error:  # fastokens raises bare exceptions for unknown formats
        _log.info("tokenizer_fallback", reason=str(error), to="tokenizers")
        return None
    return fast


def _unicode_to_byte() -> dict[str, int]:
    """GPT-2's mapping of bytes to printable characters, inverted."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in plain]
    mapping = {chr(byte): byte for byte in plain}
    return mapping | {chr(256 + number): byte for number, byte in enumerate(other)}


def _table_if_equal(data: bytes, reference: tokenizers.Tokenizer, size: int) -> TokenTable | None:
    """The table, if decoding through it equals the tokenizer on random ids."""
    document = msgspec.json.decode(data)
    decoder = document.get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        return None
    to_byte = _unicode_to_byte()
    added = reference.get_added_tokens_decoder()
    pieces: list[bytes] = []
    for number in range(size):
        token = reference.id_to_token(number)
        if number in added:
            pieces.append(b"" if added[number].special else (token or "").encode())
        elif token is None:
            pieces.append(b"")
        else:
            try:
                pieces.append(bytes(to_byte[character] for character in token))
            except KeyError:
                return None
    table = TokenTable(pieces)
    special = frozenset(number for number, token in added.items() if token.special)
    draw = random.Random(0)
    for length in (1, 2, 5, 40, 200):
        ids = tuple(draw.randrange(size) for _ in range(length))
        table_decoder = TableDecoder(table, special)
        if table_decoder.push(ids) + table_decoder.flush() != reference.decode(
            list(ids), skip_special_tokens=True
        ):
            _log.info("token_table_refused", reason="it decodes differently", tokens=ids[:10])
            return None
    return table
