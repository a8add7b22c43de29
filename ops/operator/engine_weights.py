"""`headwater ctl weights`: shows, sets and removes the engine weights of a model."""

import math
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from headwater.actors.bus.port import BusError, NoResponder
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.nats import NatsSettings
from headwater.ops.nats.connect import ports_of
from headwater.ops.nats.pool_choice import live_pools
from headwater.ops.process.text_table import table
from headwater.schemas import subjects
from headwater.schemas.messages.control import ControlReply
from headwater.schemas.messages.engine_weights import WeightsReply, WeightsRequest

REMOVE: Final = "remove"

REPLY_S: Final = 10.0
"""Longer than a router waits for its log."""

USAGE: Final = "ctl weights: give MODEL, MODEL ENGINE=WEIGHT…, or MODEL remove"

_reply = msgspec.msgpack.Decoder(WeightsReply)


async def weigh(nats: NatsSettings, words: Sequence[str], by: str, *, as_json: bool) -> int:
    """Carry out the command in these words and print the engines. 1 if it was refused. Raises `ConfigError`."""
    if not words:
        raise ConfigError(USAGE)
    model, *shares = words
    weights = parse_weights(shares)
    async with ports_of(nats, "operator", "ctl") as ports:
        pool = await pool_of(ports, model)
        answer = await request_weights(ports, pool, WeightsRequest(weights, by))
    if as_json:
        document = {"model": model, "pool": pool, "status": answer.reply.status, "engines": answer.engines}
        print(msgspec.json.encode(document).decode())
    elif answer.reply.status == 200:
        print(f"{model}, pool {pool}: {answer.reply.detail}")
        print(_table(answer))
    if answer.reply.status != 200:
        print(
            f"headwater ctl: {model}: {answer.reply.detail} (status {answer.reply.status})", file=sys.stderr
        )
    return 0 if answer.reply.status == 200 else 1


def parse_weights(shares: Sequence[str]) -> dict[str, float] | None:
    """ENGINE=WEIGHT words as weights, "remove" as none ({}), and no word as None. Raises `ConfigError`."""
    if not shares:
        return None
    if list(shares) == [REMOVE]:
        return {}
    weights: dict[str, float] = {}
    for share in shares:
        engine, sign, text = share.partition("=")
        if not (engine and sign):
            raise ConfigError(f"{USAGE}; got {share!r}")
        if engine in weights:
            raise ConfigError(f"ctl weights: {engine} has two weights")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"ctl weights: {share}: a weight is a finite number, and not negative")
        weights[engine] = weight
    if not any(weights.values()):
        raise ConfigError("ctl weights: every weight is 0, so no engine would get a request")
    return weights


async def pool_of(ports: Ports, model: str) -> str:
    """The pool that serves a model, by its name, an alias, or the pool's own name. Raises `ConfigError`."""
    cards = await CardTable(ports.cards).models()
    found = sorted(card.pool for card in cards if model in (card.name, card.pool, *card.aliases))
    if not found:
        known = ", ".join(sorted({card.name for card in cards})) or "none"
        raise ConfigError(f"there is no model {model!r}; models are: {known}")
    if len(found) > 1:
        live = await live_pools(ports)
        found = [pool for pool in found if pool in live] or found
    if len(found) > 1:
        raise ConfigError(
            f"{model} is served by {len(found)} pools ({', '.join(found)}), each with its own weights: "
            "name a pool instead. Engines share a pool if their block sizes are equal"
        )
    return found[0]


async def request_weights(ports: Ports, pool: str, request: WeightsRequest) -> WeightsReply:
    """Send a command to one of the pool's routers. Where none answers, the reply says so (404, 504)."""
    subject = subjects.engine_weights(ports.ns, pool)
    try:
        data = await ports.bus.request(subject, msgspec.msgpack.encode(request), timeout_s=REPLY_S)
    except NoResponder:
        return WeightsReply(ControlReply(404, f"no router of pool {pool} answers: start one"))
    except BusError as error:
        return WeightsReply(ControlReply(504, f"the router of pool {pool}: {error}"))
    return _reply.decode(data)


def _table(answer: WeightsReply) -> str:
    total = sum(one.weight or 0.0 for one in answer.engines)
    rows = [
        (
            one.engine,
            "not set" if one.weight is None else f"{one.weight:g}",
            "-" if one.weight is None else f"{one.weight / total:.1%}",
            f"{one.ready} of {one.workers}",
            one.requests,
        )
        for one in answer.engines
    ]
    return table(("engine", "weight", "share", "workers ready", "requests in flight"), rows)
