"""One engine's answer to one prompt: sent to an edge, and read as it streams."""

import http.client
import ssl
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from headwater.ops.config.errors import ConfigError

TIMEOUT_S: Final = 300.0
"""Without a byte for so long a request counts as failed."""


class AnswerToken(NamedTuple):
    """A generated token. Without log probabilities `logprob` is None; `top` has those of the likeliest, by text."""

    id: int
    text: str = ""
    logprob: float | None = None
    top: Mapping[str, float] = MappingProxyType({})


class GreedyAnswer(NamedTuple):
    """An engine's answer. `error` says why there is none, or only a part of one. Times in seconds."""

    engine: str
    worker: str
    tokens: tuple[AnswerToken, ...]
    first_s: float
    total_s: float
    error: str = ""


class EdgeClient:
    """Sends requests to one edge, pinned to an engine. Blocking: one request at a time.

    Raises `ConfigError` for a URL that is none.
    """

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url}: write it as http://HOST:PORT")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {
            "content-type": "application/json",
            **({"authorization": f"Bearer {key}"} if key else {}),
        }

    def ask(self, engine: str, path: str, body: dict[str, Any]) -> GreedyAnswer:
        """The answer of one engine. A failure is an answer with an error."""
        began_s = time.perf_counter()
        connection = self._connect()
        try:
            headers = {**self._headers, "x-headwater-engine": engine}
            connection.request("POST", self._prefix + path, msgspec.json.encode(body), headers)
            response = connection.getresponse()
            worker = response.getheader("x-headwater-worker", "")
            if response.status != 200:
                return GreedyAnswer(engine, worker, (), 0.0, 0.0, _error_of(response.status, response.read()))
            return _read(engine, worker, response, began_s)
        except (OSError, http.client.HTTPException) as error:
            return GreedyAnswer(engine, "", (), 0.0, 0.0, f"{type(error).__name__}: {error}")
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)


def _error_of(status: int, data: bytes) -> str:
    try:
        message = msgspec.json.decode(data)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = data[:200].decode(errors="replace")
    return f"status {status}: {message}"


def _read(engine: str, worker: str, lines: Iterator[bytes], began_s: float) -> GreedyAnswer:
    tokens: list[AnswerToken] = []
    first_s, error, whole = 0.0, "", False
    for line in lines:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            whole = True
            break
        chunk = msgspec.json.decode(line[6:])
        if "error" in chunk:
            error = str(chunk["error"].get("message", chunk["error"]))
            break
        for choice in chunk.get("choices", ()):
            tokens += tokens_of(choice)
        if tokens and not first_s:
            first_s = time.perf_counter() - began_s
    if not (whole or error):
        error = "the stream ended early"
    return GreedyAnswer(engine, worker, tuple(tokens), first_s, time.perf_counter() - began_s, error)


def tokens_of(choice: dict[str, Any]) -> list[AnswerToken]:
    """The tokens of a streamed choice, of a chat or of a completion, with their log probabilities where it has them."""
    ids: list[int] = choice.get("token_ids") or []
    found = choice.get("logprobs") or {}
    if "content" in found:
        entries = [
            (one["token"], one["logprob"], {top["token"]: top["logprob"] for top in one["top_logprobs"]})
            for one in found["content"] or ()
        ]
    else:
        names = found.get("tokens") or ()
        tops = found.get("top_logprobs") or [{}] * len(names)
        entries = [
            (name, logprob, top or {})
            for name, logprob, top in zip(names, found.get("token_logprobs") or (), tops, strict=False)
        ]
    if len(entries) != len(ids):
        return [AnswerToken(token) for token in ids]
    return [AnswerToken(token, *entry) for token, entry in zip(ids, entries, strict=True)]
