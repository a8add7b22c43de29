"""`headwater replay --into URL`: the recorded arrivals of a log, sent into an endpoint, or into a simulated fleet made for them.

A request has the length, the arrival, and the most output tokens of the recorded one. Its prompt is made up: token ids that follow from the hashes of
its blocks, so two prompts begin alike as far as the recorded ones did. What the log does not say is not replayed: texts, sampling, media (a
prompt has its length with them), adapters, tenants and sessions; all go to the completions API. Of prompts whose blocks were never announced the shared part is unknown (see
`recording`), so they share less than they did.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, get_args

import msgspec
import numpy as np

from headwater.ops.bench.client import LoadClient, StreamedAnswer, address_of
from headwater.ops.bench.generator import Generator, Pace, Sample
from headwater.ops.bench.trace import TraceRequest, mix
from headwater.ops.bench.workload import Conversation, Turn, Workload
from headwater.ops.config.sections import OWN_FLAGS, NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.launch.up import temporary_fleet
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.terminal import Progress, table
from headwater.ops.whatif.recording import Recording, recording
from headwater.ops.whatif.report import spread_of
from headwater.schemas.routing import DEFAULT_POLICY, PolicyName, Weights

CONCURRENT_MAX: Final = 256
"""Requests in flight. Beyond them arrivals are late, which is reported."""

SIMULATED: Final = "sim"
"""Stands for a temporary fleet of simulated engines like the recorded one."""

SIM_BLOCKS_MIN: Final = 16

LATE_S: Final = 0.1

FIRST_TOKEN: Final = 32
TOKENS: Final = 192
"""Token ids of prompts: every vocabulary has these."""


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
    address = address_of(url, "--into") if url != SIMULATED else None
    async with operator_ports(nats, "replay") as ports:
        pool = await choose_pool(ports, pool)
        recorded = await recording(pool, await ports.pool_log(pool), ports.requests)
    if address is None:
        async with temporary_fleet(simulated_settings(recorded)) as fleet:
            sent = await send(LoadClient(address_of(fleet.url, "--into")), recorded, speed)
    else:
        sent = await send(LoadClient(address, key), recorded, speed)
    data = as_data(recorded, speed, sent)
    print(msgspec.json.encode(data).decode() if as_json else "\n".join(lines_of(recorded, speed, sent)))
    return 1 if any(sample.failure for sample in sent) else 0


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
        "router.weights": {
            name: value
            for name, value in weights.items()
            if value != getattr(usual, name) and name not in OWN_FLAGS
        },
        "router.local_prefill_tokens": setup.weights.local_tokens,
        "router.disaggregate": "always" if setup.weights.apart else "estimate",
    }


async def send(client: LoadClient, recorded: Recording, speed: float) -> list[Sample]:
    """Send each request when it is due; returns what came of them, in their order."""
    requests = recorded.trace.requests
    prompts = {one.name: one for one in requests}
    # The text of a turn is the name of its request here: its prompt has no text.
    turns = [Turn(one.name, one.prompt_tokens, one.output_tokens) for one in requests]
    conversations = [
        Conversation((turn,), one.arrival_ns / 1e9) for turn, one in zip(turns, requests, strict=True)
    ]
    workload = Workload(recorded.trace.name, conversations)
    try:
        model = (await client.models())[0]

        async def post(turn: Turn, _: list[tuple[str, str]]) -> StreamedAnswer:
            body = {
                "model": model,
                "prompt": prompt_of(prompts[turn.text]),
                "max_tokens": turn.output_tokens,
                "ignore_eos": True,
                "stream": True,
            }
            return await client.post("/v1/completions", msgspec.json.encode(body))

        with Progress("replaying", "requests") as progress:
            pace = Pace(at_once=CONCURRENT_MAX, speed=speed, timed=True)
            generator = Generator(workload, pace, post, lambda done: progress.at(done, len(requests)))
            ran = await generator.run(Random(0))
    finally:
        client.close()
    return sorted(ran.samples, key=lambda one: one.conversation)


def _pairs(recorded: Recording, sent: Sequence[Sample]) -> list[tuple[float, float]]:
    """(recorded, now) milliseconds to the first token, of requests that succeeded both times."""
    return [
        (recorded.results[request.name].ttft_ms, (sample.first_s - sample.sent_s) * 1000)
        for request, sample in zip(recorded.trace.requests, sent, strict=True)
        if sample.failure is None and request.name in recorded.results
    ]


def as_data(recorded: Recording, speed: float, sent: Sequence[Sample]) -> dict[str, Any]:
    """The result for programs; times in milliseconds."""
    before, now = zip(*pairs, strict=True) if (pairs := _pairs(recorded, sent)) else ((), ())
    return {
        "requests": len(sent),
        "speed": speed,
        "errors": Counter(": ".join(sample.failure) for sample in sent if sample.failure),
        "late": sum(sample.sent_s - sample.due_s > LATE_S for sample in sent),
        "compared": len(pairs),
        "ttft_recorded_ms": _spread(before),
        "ttft_ms": _spread(now),
        "prompts": {"whole": recorded.whole, "partly": recorded.partly, "unknown": recorded.unknown},
        "with_media": sum(bool(request.media) for request in recorded.trace.requests),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    figures = msgspec.structs.asdict(spread_of(values)) if values else {}
    return {name: round(value, 3) for name, value in figures.items()}


def lines_of(recorded: Recording, speed: float, sent: Sequence[Sample]) -> list[str]:
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
