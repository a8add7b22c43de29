"""`headwater bench serve`: sends a workload to a server at each rate and concurrency, and shows the figures."""

import time
from functools import partial
from itertools import product
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, Final

import msgspec

from headwater.ops.bench import figures
from headwater.ops.bench.client import LoadClient, StreamedAnswer, address_of
from headwater.ops.bench.figures import ServeReport, as_data, report_of
from headwater.ops.bench.generator import Generator, LoadRun, Pace
from headwater.ops.bench.options import Arrivals, Output, Target, Traffic
from headwater.ops.bench.workload import (
    Calibration,
    Turn,
    Words,
    Workload,
    calibration_of,
    words_of,
    workload_maker,
)
from headwater.ops.config.setting import ConfigError
from headwater.ops.terminal import Progress

CONCURRENCY: Final = 8

PATHS: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

SEED_MAX: Final = 1 << 31

PER_WORD_OFF: Final = 0.02
"""By how much a server may count words of a given tokenizer otherwise before the tokenizer is another model's."""


async def serve(url: str, traffic: Traffic, arrivals: Arrivals, target: Target, output: Output) -> int:
    """Run every point and print the figures. 1 if a request failed; raises `ConfigError` for what is wrong before the first is sent."""
    seed = traffic.seed if traffic.seed >= 0 else SystemRandom().randrange(SEED_MAX)
    _check_files(output, arrivals)
    words = words_of(target.tokenizer) if target.tokenizer else Words()
    client = LoadClient(address_of(url, "bench serve"), _key(target), target.timeout_s)
    try:
        sender = Sender(client, target, target.model or (await client.models())[0])
        words.calibration = await sender.calibrate(words)
        make = workload_maker(traffic, seed, words)
        began_s = time.time()
        result = ServeReport(
            url, sender.model, target.api, traffic.workload, seed, words.calibration, began_s, []
        )
        runs: list[LoadRun] = []
        workload = make(0)
        paces = paces_of(arrivals, workload)
        for point, pace in enumerate(paces):
            if point:
                workload = make(point)
            with Progress(f"point {point + 1} of {len(paces)}", "requests") as progress:
                show = partial(progress.at, total=workload.requests)
                runs.append(await Generator(workload, pace, sender.post, show).run(Random(f"{seed} {point}")))
            report = report_of(workload.name, runs[-1], pace, output.slo)
            result.points.append(report)
            result.left_out = max(result.left_out, workload.left_out)
            if output.json_file:
                # After each point: a sweep that is stopped has what was measured.
                Path(output.json_file).write_bytes(_json(result, runs))
    finally:
        client.close()
    if output.plot:
        Path(output.plot).write_text(figures.drawn(result), encoding="utf-8")
    print(figures.as_text(result))
    return 1 if any(point.failed for point in result.points) else 0


def _check_files(output: Output, arrivals: Arrivals) -> None:
    """Raises `ConfigError` now for what would fail once all is measured."""
    if output.plot and not output.plot.endswith(".svg"):
        raise ConfigError(f"--plot {output.plot}: the picture is an .svg file")
    if output.plot and max(len(arrivals.rate), len(arrivals.concurrency)) < 2:
        raise ConfigError("--plot draws a sweep: give several numbers to --rate or --concurrency, as 1,2,4")
    for flag, name in (("--json", output.json_file), ("--plot", output.plot)):
        if name and not Path(name).absolute().parent.is_dir():
            raise ConfigError(f"{flag} {name}: its folder does not exist")


def _key(target: Target) -> str:
    try:
        return Path(target.api_key_file).read_text(encoding="utf-8").strip() if target.api_key_file else ""
    except OSError as error:
        raise ConfigError(f"--api-key-file {target.api_key_file}: {error.strerror}") from error


def paces_of(arrivals: Arrivals, workload: Workload) -> list[Pace]:
    """The points of a sweep: every rate with every concurrency. Raises `ConfigError` for options without an effect."""
    timed = workload.timed and not arrivals.rate
    if arrivals.speed != 1 and not timed:
        raise ConfigError("--speed is for a trace's own times, so for a trace without --rate")
    if arrivals.arrivals != Arrivals().arrivals and not arrivals.rate:
        raise ConfigError("--arrivals is for --rate")
    is_open = bool(arrivals.rate) or timed
    at_once = arrivals.concurrency or ((0,) if is_open else (CONCURRENCY,))
    constant = arrivals.arrivals == "constant"
    return [
        Pace(rate, limit, constant, arrivals.speed, timed)
        for rate, limit in product(arrivals.rate or (0.0,), at_once)
    ]


class Sender:
    """Makes the bodies of requests, and finds out what the server understands."""

    def __init__(self, client: LoadClient, target: Target, model: str) -> None:
        self.model = model
        self._client = client
        self._chat = target.api == "chat"
        self._path = PATHS[target.api]
        self._extra = _extra(target)
        self._usage = True

    async def post(self, turn: Turn, history: list[tuple[str, str]]) -> StreamedAnswer:
        """Send a turn after earlier ones."""
        return await self._client.post(self._path, self._body(turn, history))

    def _body(self, turn: Turn, history: list[tuple[str, str]]) -> bytes:
        body: dict[str, Any] = {"model": self.model, "max_tokens": turn.output_tokens, "stream": True}
        if self._chat:
            messages = [
                {"role": role, "content": text}
                for pair in history
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ]
            body["messages"] = [*messages, {"role": "user", "content": turn.text}]
        else:
            body["prompt"] = "".join(text for pair in history for text in pair) + turn.text
        if self._usage:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body | self._extra)

    async def calibrate(self, words: Words) -> Calibration:
        """Return how the server counts tokens, from two requests for one token each. Raises `ConfigError` if it answers neither."""
        first = await self._probe(words, 1)
        failure = first.failure
        if failure is not None and failure.cause == "HTTP 400" and "stream_options" in failure.message:
            # A server of before 2024, which does not know that a stream can have a usage.
            self._usage = False
            first = await self._probe(words, 1)
        counts = []
        for answer in (first, await self._probe(words, 2)):
            if answer.failure is not None:
                cause, message = answer.failure
                raise ConfigError(
                    f"the server does not answer a request: {cause}: {message}{self._hint(cause)}"
                )
            counts.append(answer.usage.prompt_tokens if answer.usage else -1)
        calibration = calibration_of(words.probed, *counts)
        if words.tokenizer is not None and abs(calibration.per_word - 1) > PER_WORD_OFF:
            raise ConfigError(
                f"--tokenizer: it is not that of {self.model}: the server counts {calibration.per_word:.2f} tokens for each of its words "
                "of one token"
            )
        return calibration

    def _hint(self, cause: str) -> str:
        refused = cause in ("HTTP 400", "HTTP 422") and "ignore_eos" in self._extra
        return " (if it does not know ignore_eos: --no-ignore-eos)" if refused else ""

    async def _probe(self, words: Words, times: int) -> StreamedAnswer:
        return await self.post(Turn(words.probe(times), times * words.probed, 1), [])


def _extra(target: Target) -> dict[str, Any]:
    """Further fields of every request. Raises `ConfigError`."""
    try:
        fields = msgspec.json.decode(target.extra_body, type=dict[str, Any]) if target.extra_body else {}
    except msgspec.DecodeError as error:
        raise ConfigError(f"--extra-body {target.extra_body}: {error}") from error
    fixed = fields.keys() & {"model", "messages", "prompt", "max_tokens", "stream", "stream_options"}
    if fixed:
        raise ConfigError(f"--extra-body: {', '.join(sorted(fixed))} follows from other options")
    return ({"ignore_eos": True} if target.ignore_eos else {}) | fields


def _json(result: ServeReport, runs: list[LoadRun]) -> bytes:
    """The result, with every request of every point."""
    data = msgspec.to_builtins(result)
    data["calibration"] = result.calibration._asdict()
    for point, run in zip(data["points"], runs, strict=True):
        point["began"] = run.began_s
        point["samples"] = [as_data(sample) for sample in run.samples]
    return msgspec.json.encode(data)
