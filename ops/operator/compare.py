"""`headwater compare`: sends the same prompts to two engines of one model, and prints how their answers diverge."""

import asyncio
import http.client
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable
from headwater.actors.worker.control import request_weights
from headwater.events.ports import Log
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.history.series import quantile
from headwater.ops.nats.connect import ports_of
from headwater.ops.operator.ctl import pool_of
from headwater.ops.terminal import table
from headwater.schemas.control import WeightsRequest
from headwater.schemas.events import RequestAccepted
from headwater.schemas.tables import ModelCard

TIMEOUT_S: Final = 300.0
"""The time without a byte after which a request counts as failed."""


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

    def ask(
        self, engine: str, path: str, body: dict[str, Any], *, header: str = "x-headwater-engine"
    ) -> GreedyAnswer:
        """The answer of one engine, or of what another header names. A failure is an answer with an error."""
        began_s = time.perf_counter()
        connection = self._connect()
        try:
            headers = {**self._headers, header: engine}
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
    first_s, error, is_complete = 0.0, "", False
    for line in lines:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            is_complete = True
            break
        chunk = msgspec.json.decode(line[6:])
        if "error" in chunk:
            error = str(chunk["error"].get("message", chunk["error"]))
            break
        for choice in chunk.get("choices", ()):
            tokens += tokens_of(choice)
        if tokens and not first_s:
            first_s = time.perf_counter() - began_s
    if not (is_complete or error):
        error = "the stream ended early"
    return GreedyAnswer(engine, worker, tuple(tokens), first_s, time.perf_counter() - began_s, error)


def tokens_of(choice: dict[str, Any]) -> list[AnswerToken]:
    """The tokens of a streamed choice, of a chat or of a completion, with their log probabilities where it has them."""
    ids: list[int] = choice.get("token_ids") or []
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:
        entries = [
            (
                token_entry["token"],
                token_entry["logprob"],
                {top["token"]: top["logprob"] for top in token_entry["top_logprobs"]},
            )
            for token_entry in logprobs["content"] or ()
        ]
    else:
        names = logprobs.get("tokens") or ()
        tops = logprobs.get("top_logprobs") or [{}] * len(names)
        entries = [
            (name, logprob, top or {})
            for name, logprob, top in zip(names, logprobs.get("token_logprobs") or (), tops, strict=False)
        ]
    if len(entries) != len(ids):
        return [AnswerToken(token) for token in ids]
    return [AnswerToken(token, *entry) for token, entry in zip(ids, entries, strict=True)]


# Divergence: where and by how much two answers to one prompt differ. Pure.


class LogprobGap(NamedTuple):
    """How much likelier an engine's own token was to it than the other engine's, in nats.

    `at_least`: the other's token was not among the likeliest ones that it listed, so the gap is at least this.
    """

    value: float
    at_least: bool = False


class Divergence(msgspec.Struct, frozen=True):
    """Two answers compared. `position` is the first token that differs, None where all are equal.

    There `tokens` are the two engines' (None where an answer has ended), and `gaps` each engine's preference for its own, None
    without log probabilities. `logprob_difference` is the greatest difference between the log probabilities of the
    equal tokens before, None without any.
    """

    equal_tokens: int
    position: int | None
    tokens: tuple[str | None, str | None]
    gaps: tuple[LogprobGap | None, LogprobGap | None]
    logprob_difference: float | None


def find_divergence(first_tokens: Sequence[AnswerToken], second_tokens: Sequence[AnswerToken]) -> Divergence:
    """Compare two answers token by token."""
    pairs = list(zip(first_tokens, second_tokens, strict=False))
    equal = next((at for at, (token, other) in enumerate(pairs) if token.id != other.id), len(pairs))
    differences = [
        abs(token.logprob - other.logprob)
        for token, other in pairs[:equal]
        if token.logprob is not None and other.logprob is not None
    ]
    difference = max(differences, default=None)
    if equal == len(first_tokens) == len(second_tokens):
        return Divergence(equal, None, (None, None), (None, None), difference)
    token = first_tokens[equal] if equal < len(first_tokens) else None
    other = second_tokens[equal] if equal < len(second_tokens) else None
    return Divergence(
        equal, equal, (_show(token), _show(other)), (_gap(token, other), _gap(other, token)), difference
    )


def _show(token: AnswerToken | None) -> str | None:
    return None if token is None else token.text or f"#{token.id}"


def _gap(token: AnswerToken | None, other: AnswerToken | None) -> LogprobGap | None:
    """None where an answer has ended: the end is no token with a log probability here."""
    if token is None or other is None or token.logprob is None:
        return None
    other_logprob = token.top.get(other.text) if other.text else None
    if other_logprob is not None:
        return LogprobGap(token.logprob - other_logprob)
    return LogprobGap(max(0.0, token.logprob - min(token.top.values(), default=token.logprob)), at_least=True)


class Latency(msgspec.Struct, frozen=True):
    """Percentiles by nearest rank, in milliseconds."""

    p50: float
    p99: float


class EngineSummary(msgspec.Struct, frozen=True):
    """One engine over all prompts: until the first token, and until the last. None where no request succeeded."""

    engine: str
    requests: int
    failed: int
    tokens: int
    first_token_ms: Latency | None
    total_ms: Latency | None


def summarize(engine: str, answers: Sequence[GreedyAnswer]) -> EngineSummary:
    """An engine's answers in numbers; times are those of the answers without an error."""
    complete = [answer for answer in answers if not answer.error]
    return EngineSummary(
        engine,
        len(answers),
        len(answers) - len(complete),
        sum(len(answer.tokens) for answer in complete),
        _latency([answer.first_s for answer in complete if answer.tokens]),
        _latency([answer.total_s for answer in complete]),
    )


def _latency(seconds: Sequence[float]) -> Latency | None:
    found = [quantile(seconds, share) for share in (0.50, 0.99)]
    times_ms = [round(one * 1_000.0, 3) for one in found if one is not None]
    return Latency(*times_ms) if times_ms else None


# The comparison as a document, and as text for people.


class ComparedPrompt(msgspec.Struct, frozen=True):
    """One prompt: the divergence of its two answers, or None with each engine's error."""

    prompt: str
    tokens: tuple[int, int]
    divergence: Divergence | None
    errors: tuple[str, str]


class EngineComparison(msgspec.Struct, frozen=True):
    """All prompts. `equal_share` is of the prompts that both engines answered, None if there is none."""

    model: str
    engines: tuple[EngineSummary, EngineSummary]
    prompts: tuple[ComparedPrompt, ...]
    compared: int
    equal: int
    equal_share: float | None


def compare(model: str, names: list[str], pairs: list[tuple[GreedyAnswer, GreedyAnswer]]) -> EngineComparison:
    """The comparison of these pairs of answers, to the prompts of these names."""
    prompts = tuple(
        ComparedPrompt(
            name,
            (len(first_answer.tokens), len(second_answer.tokens)),
            None
            if first_answer.error or second_answer.error
            else find_divergence(first_answer.tokens, second_answer.tokens),
            (first_answer.error, second_answer.error),
        )
        for name, (first_answer, second_answer) in zip(names, pairs, strict=True)
    )
    divergences = [entry.divergence for entry in prompts if entry.divergence is not None]
    equal = sum(entry.position is None for entry in divergences)
    first, second = ([pair[at] for pair in pairs] for at in (0, 1))
    return EngineComparison(
        model,
        (summarize(first[0].engine, first), summarize(second[0].engine, second)),
        prompts,
        len(divergences),
        equal,
        equal / len(divergences) if divergences else None,
    )


def as_text(comparison: EngineComparison) -> str:
    """Latency of both engines, the share of equal answers, and a line for each prompt whose answers differ."""
    first_engine, second_engine = (one.engine for one in comparison.engines)
    share = "" if comparison.equal_share is None else f" ({comparison.equal_share:.0%})"
    lines = [
        f"{comparison.model}: {comparison.compared} of {len(comparison.prompts)} prompts answered by both engines, "
        f"{comparison.equal} with equal tokens{share}",
        "",
        table(
            (
                *("engine", "requests", "failed", "tokens"),
                *("first token p50 ms", "p99 ms", "total p50 ms", "p99 ms"),
            ),
            [
                (
                    one.engine,
                    one.requests,
                    one.failed,
                    one.tokens,
                    *_times(one.first_token_ms),
                    *_times(one.total_ms),
                )
                for one in comparison.engines
            ],
        ),
    ]
    spread = [one.divergence.logprob_difference for one in comparison.prompts if one.divergence is not None]
    measured = [one for one in spread if one is not None]
    if measured:
        lines += ["", f"log probabilities of equal tokens differ by at most {max(measured):.6f}"]
    differing = [
        (one.prompt, one.divergence)
        for one in comparison.prompts
        if one.divergence is not None and one.divergence.position is not None
    ]
    if differing:
        columns = (
            "prompt",
            "first differing token",
            first_engine,
            second_engine,
            f"gap {first_engine}",
            f"gap {second_engine}",
        )
        rows = [
            (name, divergence.position, *map(_token, divergence.tokens), *map(_written_gap, divergence.gaps))
            for name, divergence in differing
        ]
        lines += ["", table(columns, rows)]
        lines += [
            "gap: by how much an engine prefers its own token to the other's, in nats; about 0 is rounding"
        ]
    lines += [
        f"{one.prompt}: {engine}: {error}"
        for one in comparison.prompts
        for engine, error in zip((first_engine, second_engine), one.errors, strict=True)
        if error
    ]
    return "\n".join(lines)


def _times(latency: Latency | None) -> tuple[str, str]:
    return ("-", "-") if latency is None else (f"{latency.p50:.1f}", f"{latency.p99:.1f}")


def _token(text: str | None) -> str:
    return "(ended)" if text is None else repr(text)


def _written_gap(gap: LogprobGap | None) -> str:
    return "-" if gap is None else f"{'> ' if gap.at_least else ''}{gap.value:.6f}"


# The prompts of a comparison, from a file or the request log.

PATHS: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
"""The path of each endpoint, by its name in the request log."""

DROPPED: Final = frozenset(
    (
        *("best_of", "echo", "min_p", "priority", "prompt_logprobs", "seed", "stream_options", "suffix"),
        *("top_k", "top_p", "user", "prompt_cache_key", "logprobs", "top_logprobs", "return_token_ids"),
        "max_completion_tokens",
    )
)
"""Fields of a recorded request that are not sent again: they mean nothing at temperature 0, or are set by the comparison."""


class PromptRequest(NamedTuple):
    """A request to compare: `fields` go to `path` as they are, with what the comparison adds. `name` is for people."""

    name: str
    path: str
    fields: Mapping[str, Any]


async def recorded_prompts(log: Log, names: frozenset[str], limit: int) -> list[PromptRequest]:
    """The newest `limit` different requests to a model under any of its names. Raises `ConfigError` if there is none."""
    by_body: dict[bytes, PromptRequest] = {}
    hidden = 0
    async for piece in log.read(0, follow=False):
        for _, event in piece.events():
            if not isinstance(event, RequestAccepted) or event.model not in names:
                continue
            prompt = prompt_of(event)
            hidden += event.payload != "full"
            if prompt is None:
                continue
            # The newest one counts, in the order of the log.
            by_body.pop(event.body, None)
            by_body[event.body] = prompt
            if len(by_body) > limit:
                del by_body[next(iter(by_body))]
    if not by_body:
        raise ConfigError(
            f"the request log has no prompt of this model that can be sent again ({hidden} requests without their "
            "payload): start edges with --record-payloads full, or give --prompts FILE"
        )
    return list(by_body.values())


def prompt_of(event: RequestAccepted) -> PromptRequest | None:
    """A recorded request as a prompt; None if its payload is not recorded, or it is not one chat or completion."""
    path = PATHS.get(event.endpoint)
    if event.payload != "full" or path is None:
        return None
    try:
        fields = msgspec.json.decode(event.body, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    return PromptRequest(event.request, path, fields) if _is_one(fields) else None


def read_prompts(file: Path, limit: int) -> list[PromptRequest]:
    """The first `limit` lines of a JSONL file: strings, or requests with `prompt` or `messages`. Raises `ConfigError`."""
    try:
        lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {file}: {error}") from error
    prompts = [
        _parse(line, f"--prompts {file}: line {number}") for number, line in enumerate(lines[:limit], 1)
    ]
    if not prompts:
        raise ConfigError(f"--prompts {file}: it is empty")
    return prompts


def _parse(line: str, place: str) -> PromptRequest:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{place}: {error}") from error
    fields = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not _is_one(fields):
        raise ConfigError(f'{place}: write a string, {{"prompt": …}} or {{"messages": […]}}, with one prompt')
    chat = "messages" in fields
    name = place.rpartition(": ")[2]
    return PromptRequest(name, PATHS["chat" if chat else "completions"], fields)


def _is_one(fields: Mapping[str, Any]) -> bool:
    """Is it a chat, or a completion of one prompt, as text or as token ids?"""
    if "messages" in fields:
        return isinstance(fields["messages"], list)
    prompt = fields.get("prompt")
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
    )


def request_body(prompt: PromptRequest, model: str, max_tokens: int, logprobs: int) -> dict[str, Any]:
    """The body that asks for a greedy answer: streamed, with token ids, and the `logprobs` likeliest tokens (0: none)."""
    fields = {name: value for name, value in prompt.fields.items() if name not in DROPPED}
    logprob_fields: dict[str, Any] = {}
    if logprobs:
        chat = prompt.path == PATHS["chat"]
        logprob_fields = {"logprobs": True, "top_logprobs": logprobs} if chat else {"logprobs": logprobs}
    requested_tokens = prompt.fields.get("max_completion_tokens") or prompt.fields.get("max_tokens")
    tokens = (
        min(requested_tokens, max_tokens)
        if isinstance(requested_tokens, int) and requested_tokens > 0
        else max_tokens
    )
    return {
        **fields,
        **logprob_fields,
        "model": model,
        "max_tokens": tokens,
        "temperature": 0,
        "n": 1,
        "stream": True,
        "return_token_ids": True,
    }


# The run of a comparison.

LOGPROBS: Final = 5
"""Likeliest tokens to request: the most that OpenAI's completions allow."""


class CompareOptions(NamedTuple):
    """What to compare and where. Without `engines` those that have a ready worker, if they are two."""

    model: str
    url: str
    key_file: str
    prompts: str
    engines: tuple[str, ...]
    limit: int
    max_tokens: int
    as_json: bool


class _Plan(NamedTuple):
    model: str
    engines: tuple[str, str]
    prompts: list[PromptRequest]
    logprobs: int


async def run_compare(nats: NatsSettings, options: CompareOptions) -> int:
    """Compare and print. 1 if a request failed; a divergence is no failure. Raises `ConfigError`."""
    client = EdgeClient(options.url, read_key(options.key_file))
    async with ports_of(nats, "operator", "compare") as ports:
        plan = await _plan(ports, options)
    pairs = [
        # Not in parallel: latency is compared too. In turns, so that no engine is always the one with a cold start.
        await asyncio.to_thread(_ask_both, client, plan, prompt, options.max_tokens, swapped=bool(number % 2))
        for number, prompt in enumerate(plan.prompts)
    ]
    comparison = compare(plan.model, [prompt.name for prompt in plan.prompts], pairs)
    print(msgspec.json.encode(comparison).decode() if options.as_json else as_text(comparison))
    return 1 if any(engine.failed for engine in comparison.engines) else 0


def _ask_both(
    client: EdgeClient, plan: _Plan, prompt: PromptRequest, max_tokens: int, *, swapped: bool
) -> tuple[GreedyAnswer, GreedyAnswer]:
    body = request_body(prompt, plan.model, max_tokens, plan.logprobs)
    order = plan.engines[::-1] if swapped else plan.engines
    answers = {engine: client.ask(engine, prompt.path, body) for engine in order}
    return answers[plan.engines[0]], answers[plan.engines[1]]


async def _plan(ports: Ports, options: CompareOptions) -> _Plan:
    pool = await pool_of(ports, options.model)
    card = await CardTable(ports.cards).get_model(pool)
    if card is None:
        raise ConfigError(f"pool {pool} has lost its model card")
    engines = await _choose_engines(ports, pool, options.engines)
    if options.prompts:
        prompts = read_prompts(Path(options.prompts), options.limit)
    else:
        names = frozenset((card.name, *card.aliases))
        prompts = await recorded_prompts(ports.requests, names, options.limit)
    return _Plan(card.name, engines, prompts, _logprobs(card, engines))


async def _choose_engines(ports: Ports, pool: str, requested: tuple[str, ...]) -> tuple[str, str]:
    answer = await request_weights(ports, pool, WeightsRequest())
    if answer.reply.status != 200:
        raise ConfigError(f"compare: {answer.reply.detail}")
    ready = [status.engine for status in answer.engines if status.ready]
    chosen = requested or tuple(ready)
    if missing := [engine for engine in chosen if engine not in ready]:
        raise ConfigError(
            f"--engines: {', '.join(missing)} has no worker that takes requests; ready are {', '.join(ready) or 'none'}"
        )
    if len(chosen) != 2 or chosen[0] == chosen[1]:
        raise ConfigError(
            f"compare: two engines are compared, and {len(chosen)} would be ({', '.join(chosen) or 'none'}): "
            "name two with --engines"
        )
    return chosen[0], chosen[1]


def _logprobs(card: ModelCard, engines: tuple[str, str]) -> int:
    """Return how many likeliest tokens both engines can list; 0: only tokens are compared."""
    able = all("logprobs" in card.engines.get(engine, ()) for engine in engines)
    return min(LOGPROBS, card.logprobs_max) if able else 0


def read_key(file: str) -> str:
    """The API key in a file, "" without one. Raises `ConfigError`."""
    if not file:
        return ""
    try:
        return Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file}: {error}") from error
