"""`headwater replay --into URL`: the recorded arrivals of a log, sent into an endpoint, or into a simulated fleet made for them.

A request has the length, the arrival, and the most output tokens of the recorded one. Its prompt is made up: token ids that follow from the hashes of
its blocks, so two prompts begin alike as far as the recorded ones did. What the log does not say is not replayed: texts, sampling, media (a
prompt has its length with them), adapters, tenants and sessions; all go to the completions API. Of prompts whose blocks were never announced the shared part is unknown (see
`recording`), so they share less than they did.
"""

import asyncio
import http.client
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args
from urllib.parse import urlsplit

import msgspec
import numpy as np

from headwater.ops.config.nats import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.connect import operator_ports
from headwater.ops.nats.pool_choice import choose_pool
from headwater.ops.process.progress import Progress
from headwater.ops.process.text_table import table
from headwater.ops.start.temporary import temporary_fleet
from headwater.ops.whatif.recording import Recording, recording
from headwater.ops.whatif.trace import TraceRequest, mix
from headwater.router.decision.names import DEFAULT_POLICY, PolicyName
from headwater.schemas.events.route import Weights

CONCURRENT_MAX: Final = 256
"""Requests in flight. Beyond them arrivals are late, which is reported."""

SIMULATED: Final = "sim"
"""Stands for a temporary fleet of simulated engines like the recorded one."""

SIM_BLOCKS_MIN: Final = 16

TIMEOUT_S: Final = 600.0
LATE_S: Final = 0.1

FIRST_TOKEN: Final = 32
TOKENS: Final = 192
"""Token ids of prompts: every vocabulary has these."""


class Sent(NamedTuple):
    """What came of a request: when it was sent after it was due, and its time to first token; `error` is empty if it succeeded."""

    name: str
    late_s: float
    ttft_ms: float = -1.0
    error: str = ""


class Endpoint:
    """An endpoint of OpenAI's API. Blocking; used from several threads. Raises `ConfigError` for a URL that is none."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--into {url}: write it as http://HOST:PORT, or {SIMULATED}")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def _connect(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)

    def model(self) -> str:
        """The first model of the endpoint. Raises `ConfigError` if it cannot be asked."""
        connection = self._connect()
        try:
            connection.request("GET", f"{self._prefix}/v1/models", headers=self._headers)
            answer = connection.getresponse()
            data = answer.read()
            if answer.status != 200:
                raise ConfigError(f"--into: {self._host}: GET /v1/models: status {answer.status}")
            return str(msgspec.json.decode(data)["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"--into: {self._host} is out of reach: {error}") from error
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            raise ConfigError(f"--into: {self._host} lists no models") from error
        finally:
            connection.close()

    def complete(self, model: str, request: TraceRequest) -> tuple[float, str]:
        """Send a request; returns (milliseconds to the first token, error)."""
        body = {
            "model": model,
            "prompt": prompt_of(request),
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        began_s, first_ms = time.perf_counter(), -1.0
        connection = self._connect()
        try:
            headers = {"content-type": "application/json", **self._headers}
            connection.request("POST", f"{self._prefix}/v1/completions", msgspec.json.encode(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                return -1.0, f"status {answer.status}: {answer.read()[:200].decode(errors='replace')}"
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    return first_ms, ""
                if line.startswith(b'data: {"error"'):
                    return first_ms, line[6:206].decode(errors="replace").strip()
                if first_ms < 0:
                    first_ms = (time.perf_counter() - began_s) * 1000
            return first_ms, "the stream ended before [DONE]"
        except (OSError, http.client.HTTPException) as error:
            return first_ms, f"{type(error).__name__}: {error}"
        finally:
            connection.close()


def prompt_of(request: TraceRequest) -> list[int]:
    """Token ids of a prompt: those of a block follow from its hash, which is one of all before it too."""
    blocks = np.array(request.ids, np.uint64)[:, None]
    with np.errstate(over="ignore"):
        seeds = blocks * np.uint64(request.unit + 1) + np.arange(request.unit, dtype=np.uint64)
    tokens = FIRST_TOKEN + (mix(seeds.reshape(-1)) % np.uint64(TOKENS)).astype(np.int64)
    return [int(token) for token in tokens[: request.prompt_tokens]]


async def replay_into(
    nats: NatsSettings, pool: str, url: str, speed: float, *, key_file: str = "", as_json: bool = False
) -> int:
    """Send the recorded requests, `speed` times as fast as they came, to a URL or to `SIMULATED`. 1 if one failed."""
    try:
        key = Path(key_file).read_text(encoding="utf-8").strip() if key_file else ""
    except OSError as error:
        raise ConfigError(f"--api-key-file {key_file}: {error.strerror}") from error
    endpoint = Endpoint(url, key) if url != SIMULATED else None
    async with operator_ports(nats, "replay") as ports:
        pool = await choose_pool(ports, pool)
        recorded = await recording(pool, await ports.pool_log(pool), ports.requests)
    if endpoint is None:
        async with temporary_fleet(simulated_settings(recorded)) as fleet:
            sent = await _send_all(Endpoint(fleet.url), recorded, speed)
    else:
        sent = await _send_all(endpoint, recorded, speed)
    data = as_data(recorded, speed, sent)
    print(msgspec.json.encode(data).decode() if as_json else "\n".join(lines_of(recorded, speed, sent)))
    return 1 if any(one.error for one in sent) else 0


def simulated_settings(recorded: Recording) -> dict[str, Any]:
    """Settings, by key, of a fleet of simulated engines with the recorded roles, cache sizes, routing and, where they are known, step times.

    Media are replaced by tokens, so nothing has to be encoded.
    """
    setup, usual = recorded.setup, Weights()
    requests = recorded.trace.requests
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    weights = {name: getattr(setup.weights, name) for name in Weights.__struct_fields__}
    return {
        "fleet.workers": setup.workers,
        "fleet.prefill_workers": setup.prefill_workers,
        "fleet.decode_workers": setup.decode_workers,
        "worker.block_size": setup.block_size,
        "worker.max_model_len": longest + setup.block_size,
        "sim.blocks": max(setup.blocks, 2 + longest // setup.block_size, SIM_BLOCKS_MIN),
        "sim.step_time": setup.step_time,
        "router.policy": setup.policy if setup.policy in get_args(PolicyName) else DEFAULT_POLICY,
        "router.weights": {name: value for name, value in weights.items() if value != getattr(usual, name)},
    }


async def _send_all(endpoint: Endpoint, recorded: Recording, speed: float) -> list[Sent]:
    model = await asyncio.to_thread(endpoint.model)
    return await send(endpoint, model, recorded.trace.faster(speed).requests)


async def send(endpoint: Endpoint, model: str, requests: Sequence[TraceRequest]) -> list[Sent]:
    """Send each request when it is due; returns their results in order."""
    loop = asyncio.get_running_loop()
    began_s, done = loop.time(), 0
    with ThreadPoolExecutor(CONCURRENT_MAX) as pool, Progress("replaying", "requests") as progress:

        def complete(request: TraceRequest) -> Sent:
            late_s = loop.time() - began_s - request.arrival_ns / 1e9
            ttft_ms, error = endpoint.complete(model, request)
            return Sent(request.name, late_s, ttft_ms, error)

        async def one(request: TraceRequest) -> Sent:
            nonlocal done
            await asyncio.sleep(max(0.0, began_s + request.arrival_ns / 1e9 - loop.time()))
            found = await loop.run_in_executor(pool, complete, request)
            done += 1
            progress.at(done, len(requests))
            return found

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(request)) for request in requests]
    return [task.result() for task in running]


def _pairs(recorded: Recording, sent: Sequence[Sent]) -> list[tuple[float, float]]:
    """(recorded, now) milliseconds to the first token, of requests that succeeded both times."""
    return [
        (recorded.results[one.name].ttft_ms, one.ttft_ms)
        for one in sent
        if not one.error and one.ttft_ms >= 0 and one.name in recorded.results
    ]


def as_data(recorded: Recording, speed: float, sent: Sequence[Sent]) -> dict[str, Any]:
    """The result for programs; times in milliseconds."""
    before, now = zip(*pairs, strict=True) if (pairs := _pairs(recorded, sent)) else ((), ())
    return {
        "requests": len(sent),
        "speed": speed,
        "errors": Counter(one.error for one in sent if one.error),
        "late": sum(one.late_s > LATE_S for one in sent),
        "compared": len(pairs),
        "ttft_recorded_ms": _spread(before),
        "ttft_ms": _spread(now),
        "prompts": {"whole": recorded.whole, "partly": recorded.partly, "unknown": recorded.unknown},
        "with_media": sum(bool(request.media) for request in recorded.trace.requests),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(values, (50, 90, 99))
    names = ("mean", "p50", "p90", "p99")
    return {
        name: round(float(value), 3) for name, value in zip(names, (np.mean(values), *found), strict=True)
    }


def lines_of(recorded: Recording, speed: float, sent: Sequence[Sent]) -> list[str]:
    """The result for people."""
    data = as_data(recorded, speed, sent)
    failed = sum(data["errors"].values())
    lines = [
        f"{recorded.trace.name}: {len(sent)} requests, {speed:g} times as fast; {failed} failed, {data['late']} were sent late",
        f"prompts known completely {recorded.whole}, as far as matched {recorded.partly}, not at all {recorded.unknown}",
    ]
    if data["with_media"]:
        lines.append(f"{data['with_media']} had media, in whose place there are tokens")
    if data["compared"]:
        rows = [
            (label, *(f"{value:.1f}" for value in data[key].values()))
            for label, key in (("recorded", "ttft_recorded_ms"), ("now", "ttft_ms"))
        ]
        lines.append(table(("TTFT ms", "mean", "p50", "p90", "p99"), rows))
    lines += [f"{count} x {error}" for error, count in data["errors"].most_common(5)]
    return lines
