"""`headwater ctl`: control commands to workers, from a terminal."""

import asyncio
import getpass
import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable
from headwater.actors.worker.control import list_workers, request_weights, send_command, worker_leases
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.config import controller_kind
from headwater.ops.nats.connect import live_pools, ports_of
from headwater.ops.terminal import table
from headwater.schemas.control import (
    COMMANDS,
    Command,
    ControlReply,
    ControlRequest,
    WeightsReply,
    WeightsRequest,
)

POSITIONAL: Final[dict[str, tuple[str, ...]]] = {
    "role": ("role",),
    "load-lora": ("name", "source"),
    "unload-lora": ("name",),
    "taint": ("name",),
    "untaint": ("name",),
}
"""Arguments of commands that are written without a flag, in this order."""


class ControlCall(NamedTuple):
    """One `headwater ctl`: its words, and the arguments that its flags give."""

    words: tuple[str, ...]
    given: Mapping[str, Any]
    everyone: bool = False
    by: str = ""
    timeout_s: float = 900.0
    as_json: bool = False


async def ctl(nats: NatsSettings, call: ControlCall) -> int:
    """Send a command. 0 if every worker executed it; else 1, and why on standard error. Raises `ConfigError`."""
    words, by = call.words, call.by or whoami()
    async with ports_of(nats, controller_kind(nats), "ctl") as ports:
        if words == ("list",) and not call.everyone:
            return await _list(ports, by, as_json=call.as_json)
        names = [] if call.everyone else list(words[:1])
        command, arguments = parse_call(words if call.everyone else words[1:], call.given)
        if call.everyone:
            names = sorted(await worker_leases(ports))
            if not names:
                print("headwater ctl: no worker has a lease", file=sys.stderr)
                return 1
        request = ControlRequest(command, arguments, by)
        replies = await asyncio.gather(
            *(send_command(ports, name, request, within_s=call.timeout_s) for name in names)
        )
    for name, reply in zip(names, replies, strict=True):
        _show(name, reply, as_json=call.as_json)
    return 0 if all(reply.status == 200 for reply in replies) else 1


def parse_call(words: Sequence[str], options: Mapping[str, Any]) -> tuple[Command, dict[str, Any]]:
    """The command in these words, and its arguments from words and flags. Raises `ConfigError`."""
    if not words:
        raise ConfigError("ctl: give WORKER COMMAND [ARGUMENT…], --all COMMAND, list, or weights MODEL")
    name, *values = words
    command = next((candidate for candidate in COMMANDS if candidate == name), None)
    if command is None:
        raise ConfigError(f"ctl: there is no command {name!r}; commands are {', '.join(COMMANDS)}")
    places = POSITIONAL.get(command, ())
    if len(values) > len(places):
        takes = " ".join(place.upper() for place in places) or "no arguments"
        raise ConfigError(f"ctl: {command} takes {takes}, got {' '.join(values)}")
    arguments: dict[str, Any] = dict(zip(places, values))
    arguments |= {name: value for name, value in options.items() if value is not None}
    return command, arguments


def whoami() -> str:
    """user@host, for the audit."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have no name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _show(worker: str, reply: ControlReply, *, as_json: bool) -> None:
    if as_json:
        document = {"worker": worker, **msgspec.structs.asdict(reply)}
        print(msgspec.json.encode(document).decode())
    elif reply.status == 200:
        print(f"{worker}: {reply.detail}")
        for key, value in reply.data.items():
            print(f"  {key}: {value if isinstance(value, str) else msgspec.json.encode(value).decode()}")
    if reply.status != 200:
        print(f"headwater ctl: {worker}: {reply.detail} (status {reply.status})", file=sys.stderr)


async def _list(ports: Ports, by: str, *, as_json: bool) -> int:
    workers = await list_workers(ports, by)
    if as_json:
        print(msgspec.json.encode(workers).decode())
        return 0
    rows = [
        (
            worker["worker"],
            worker["pool"],
            worker.get("role", "?"),
            worker["state"],
            worker.get("load", {}).get("running", "-"),
            worker.get("load", {}).get("waiting", "-"),
            f"{worker['load']['used_blocks']}/{worker['load']['total_blocks']}" if "load" in worker else "-",
            worker.get("epoch", "-"),
            worker.get("revision", "-"),
            ", ".join(worker.get("loras", [])),
            ", ".join(worker.get("taints", [])),
        )
        for worker in workers
    ]
    print(
        table(
            (
                *("worker", "pool", "role", "state", "running", "waiting", "blocks", "epoch", "revision"),
                *("loras", "taints"),
            ),
            rows,
        )
    )
    return 0


# `headwater ctl weights`: shows, sets and removes the engine weights of a model.

REMOVE: Final = "remove"

USAGE: Final = "ctl weights: give MODEL, MODEL ENGINE=WEIGHT…, or MODEL remove"


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
    pools = sorted(card.pool for card in cards if model in (card.name, card.pool, *card.aliases))
    if not pools:
        names = ", ".join(sorted({card.name for card in cards})) or "none"
        raise ConfigError(f"there is no model {model!r}; models are: {names}")
    if len(pools) > 1:
        live = await live_pools(ports)
        pools = [pool for pool in pools if pool in live] or pools
    if len(pools) > 1:
        raise ConfigError(
            f"{model} is served by {len(pools)} pools ({', '.join(pools)}), each with its own weights: "
            "name a pool instead. Engines share a pool if their block sizes are equal"
        )
    return pools[0]


def _table(answer: WeightsReply) -> str:
    total = sum(engine.weight or 0.0 for engine in answer.engines)
    rows = [
        (
            engine.engine,
            "not set" if engine.weight is None else f"{engine.weight:g}",
            "-" if engine.weight is None else f"{engine.weight / total:.1%}",
            f"{engine.ready} of {engine.workers}",
            engine.requests,
        )
        for engine in answer.engines
    ]
    return table(("engine", "weight", "share", "workers ready", "requests in flight"), rows)
