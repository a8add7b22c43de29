"""Traces: arrival times, prompts, answer lengths and media of requests. A prompt is its blocks' hashes and a length."""

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from headwater.engines.sim import AUDIO_RATE_HZ
from headwater.engines.sim.model import media_support
from headwater.engines.sim.scheduler import MediaSpan
from headwater.ops.config.setting import ConfigError
from headwater.schemas.hashing import U64
from headwater.schemas.tables import MediaSupport, count_media_tokens

TRACE_BLOCK = 512
"""Tokens per id of a Mooncake trace."""

_M1, _M2, _GOLDEN = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), 0x9E3779B97F4A7C15
_U64 = (1 << 64) - 1
_GZIP = b"\x1f\x8b"


class TraceRequest(NamedTuple):
    """One request: nanoseconds after the trace's start, tokens, and the ids of its blocks.

    `ids[i]` identifies the i-th `unit` tokens of the prompt and all before them; the last may be a partial block.
    """

    name: str
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    unit: int = TRACE_BLOCK
    session: str = ""
    tenant: str = ""
    media: tuple[MediaSpan, ...] = ()


class Trace(NamedTuple):
    """Requests by arrival, and a name for the whole."""

    name: str
    requests: tuple[TraceRequest, ...]

    def faster(self, speed: float) -> "Trace":
        """The same requests, arriving `speed` times as fast."""
        if speed == 1:
            return self
        return Trace(
            self.name, tuple(r._replace(arrival_ns=round(r.arrival_ns / speed)) for r in self.requests)
        )

    def first(self, count: int) -> "Trace":
        """Return a trace of only the first requests; all for 0."""
        return Trace(self.name, self.requests[:count]) if count else self


@cache
def _support() -> MediaSupport:
    """Return how the simulated model takes media."""
    return media_support()


class _TraceMedia(msgspec.Struct, forbid_unknown_fields=True):
    """An item of media in a prompt: its first token, and its tokens or its size, in pixels, frames or seconds."""

    id: str | int
    start: int
    tokens: int = 0
    width: int = 0
    height: int = 0
    frames: int = 0
    seconds: float = 0.0
    kind: Literal["image", "video", "audio"] = "image"

    def span(self) -> MediaSpan:
        """Return the position of the item. Raises ValueError for an invalid size, or one that the simulated model does not take."""
        tokens = self.tokens or count_media_tokens(_support(), self.kind, self._shape())
        return MediaSpan(str(self.id), self.start, tokens, self.kind)

    def _shape(self) -> tuple[int, ...]:
        sizes: dict[str, tuple[str, tuple[int, ...]]] = {
            "image": ("width and height in pixels", (self.height, self.width)),
            "video": ("frames, width and height in pixels", (self.frames, self.height, self.width)),
            "audio": ("seconds", (round(self.seconds * AUDIO_RATE_HZ),)),
        }
        needed, shape = sizes[self.kind]
        if min(shape) < 1:
            raise ValueError(f"{self.kind} {self.id} needs its tokens, or {needed}")
        return shape


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session_id: str | int = ""
    user_id: str | int = ""
    media: tuple[_TraceMedia, ...] = ()
    images: tuple[_TraceMedia, ...] = ()
    """What `media` is called in traces that have images only."""


def read(path: Path) -> Trace:
    """Read a trace file in Mooncake's format: one JSON object per line, plain or gzipped.

    Raises `ConfigError` naming file and line.
    """
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data.startswith(_GZIP) else data
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    requests = tuple(_parse(path, text.split(b"\n")))
    if not requests:
        raise ConfigError(
            f"{path}: contains no request; expected one JSON object per line (Mooncake's format)"
        )
    return Trace(path.name, requests)


def write(path: Path, trace: Trace) -> None:
    """Write a trace file in Mooncake's format, one JSON object per line. Sessions, tenants and media are left out.

    Another program's replay delays a session's next request until the one before is answered, so it would see other arrivals.
    """
    with path.open("wb") as file:
        for request in trace.requests:
            milliseconds = request.arrival_ns / 1e6
            line = {
                # Some readers take whole numbers only.
                "timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.ids,
            }
            file.write(msgspec.json.encode(line) + b"\n")


def _parse(path: Path, lines: Iterable[bytes]) -> Iterator[TraceRequest]:
    decode = msgspec.json.Decoder(_Line).decode
    before = -1.0
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        wrong = _wrong(line, before)
        try:
            media = tuple([item.span() for item in line.media or line.images])
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        wrong = wrong or _wrong_media(line, media)
        if wrong:
            raise ConfigError(f"{path}, line {number}: {wrong}")
        before = line.timestamp
        yield TraceRequest(
            f"r{number - 1}",
            round(line.timestamp * 1e6),
            line.input_length,
            # A trace has requests that ended without a token; an engine generates at least one.
            max(1, line.output_length),
            line.hash_ids,
            session=str(line.session_id),
            tenant=str(line.user_id),
            media=media,
        )


def _wrong_media(line: _Line, media: Sequence[MediaSpan]) -> str:
    if line.media and line.images:
        return "media and images: list all of them as media"
    end = 0
    for item in media:
        if item.tokens < 1 or item.start < end or item.start + item.tokens > line.input_length:
            return (
                f"{item.kind} {item.id} has tokens {item.start} to {item.start + item.tokens} of {line.input_length}: "
                "media are in order, do not overlap and are within the prompt"
            )
        end = item.start + item.tokens
    return ""


def _wrong(line: _Line, before: float) -> str:
    if line.input_length < 1 or line.output_length < 0:
        return f"input_length {line.input_length}, output_length {line.output_length}: at least 1 and 0 are required"
    full, begun = line.input_length // TRACE_BLOCK, -(-line.input_length // TRACE_BLOCK)
    # Some tools omit a last partial block.
    if len(line.hash_ids) not in (full, begun):
        return (
            f"{len(line.hash_ids)} hash_ids for {line.input_length} tokens; "
            f"{begun} are required, one for each {TRACE_BLOCK} tokens or part of them"
        )
    if line.timestamp < before:
        return f"timestamp {line.timestamp:g} is less than {before:g} before it; sort the lines by timestamp"
    if line.timestamp < 0:
        return f"timestamp {line.timestamp:g} is negative"
    if line.hash_ids and min(line.hash_ids) < 0:
        return f"hash id {min(line.hash_ids)} is negative"
    return ""


def check_block_size(requests: tuple[TraceRequest, ...], size: int) -> None:
    """Raises `ConfigError` where the trace cannot identify blocks of `size` tokens."""
    for unit in {request.unit for request in requests}:
        if unit % size and size % unit:
            raise ConfigError(
                f"--block-size {size}: the trace has blocks of {unit} tokens, so use a divisor or a multiple of that"
            )


def hashes_of(request: TraceRequest, size: int) -> U64:
    """The sequence hashes of a prompt's full blocks of `size` tokens. uint64, shape (prompt_tokens // size,)."""
    full = request.prompt_tokens // size
    ids = np.array(request.ids, np.uint64)
    if size >= request.unit:
        step = size // request.unit
        return mix(ids[step - 1 :: step][:full])
    within = np.arange(request.unit // size, dtype=np.uint64)
    return mix((mix(ids)[:, None] + within).ravel()[:full])


def all_hashes(requests: Sequence[TraceRequest], size: int) -> list[U64]:
    """`hashes_of` each request; where that is one hash per id, all are mixed at once, as a call costs more than a prompt."""
    if not requests or any(size < request.unit for request in requests):
        return [hashes_of(request, size) for request in requests]
    chosen = [
        request.ids[size // request.unit - 1 :: size // request.unit][: request.prompt_tokens // size]
        for request in requests
    ]
    ends = np.cumsum([len(ids) for ids in chosen])
    return np.split(mix(np.fromiter(chain.from_iterable(chosen), np.uint64, ends[-1])), ends[:-1])


def own_hash(number: int, block: int) -> int:
    """The hash of a block that only one request has: of its generated tokens."""
    return _mix_one(_mix_one((1 << 63) + number) + block)


def mix(values: U64) -> U64:
    """A 64-bit hash of each value, never 0 (splitmix64's finaliser)."""
    with np.errstate(over="ignore"):
        state = values + np.uint64(_GOLDEN)
        state = (state ^ (state >> np.uint64(30))) * _M1
        state = (state ^ (state >> np.uint64(27))) * _M2
        state ^= state >> np.uint64(31)
    state[state == 0] = 1
    return state


def _mix_one(value: int) -> int:
    """`mix` of one value, without an array."""
    state = (value + _GOLDEN) & _U64
    state = ((state ^ (state >> 30)) * int(_M1)) & _U64
    state = ((state ^ (state >> 27)) * int(_M2)) & _U64
    return (state ^ (state >> 31)) or 1
