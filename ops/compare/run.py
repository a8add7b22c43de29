"""`headwater compare`: sends the same prompts to two engines of one model, and prints how their answers diverge."""

import asyncio
from pathlib import Path
from typing import Final, NamedTuple

from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable
from headwater.ops.compare.answer import EdgeClient, GreedyAnswer
from headwater.ops.compare.prompts import PromptRequest, read_prompts, recorded_prompts, request_body
from headwater.ops.compare.report import as_json, as_text, compare
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.nats import NatsSettings
from headwater.ops.nats.connect import ports_of
from headwater.ops.operator.engine_weights import pool_of, request_weights
from headwater.schemas.messages.engine_weights import WeightsRequest
from headwater.schemas.tables.card import ModelCard

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
    client = EdgeClient(options.url, _read_key(options.key_file))
    async with ports_of(nats, "operator", "compare") as ports:
        plan = await _plan(ports, options)
    pairs = [
        # Not in parallel: latency is compared too. In turns, so that no engine is always the one with a cold start.
        await asyncio.to_thread(_ask_both, client, plan, prompt, options.max_tokens, swapped=bool(number % 2))
        for number, prompt in enumerate(plan.prompts)
    ]
    found = compare(plan.model, [prompt.name for prompt in plan.prompts], pairs)
    print(as_json(found) if options.as_json else as_text(found))
    return 1 if any(one.failed for one in found.engines) else 0


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


async def _choose_engines(ports: Ports, pool: str, wanted: tuple[str, ...]) -> tuple[str, str]:
    answer = await request_weights(ports, pool, WeightsRequest())
    if answer.reply.status != 200:
        raise ConfigError(f"compare: {answer.reply.detail}")
    ready = [one.engine for one in answer.engines if one.ready]
    chosen = wanted or tuple(ready)
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
    """How many likeliest tokens both engines can list; 0: only tokens are compared."""
    able = all("logprobs" in card.engines.get(engine, ()) for engine in engines)
    return min(LOGPROBS, card.logprobs_max) if able else 0


def _read_key(file: str) -> str:
    if not file:
        return ""
    try:
        return Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file}: {error}") from error
