"""`headwater ctl`: control commands to workers, from a terminal."""

import asyncio
import getpass
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.control.client import list_workers, send_command, worker_leases
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.nats import NatsSettings
from headwater.ops.nats.connect import ports_of
from headwater.ops.nats.credentials import controller_kind
from headwater.ops.process.text_table import table
from headwater.schemas.messages.control import COMMANDS, Command, ControlReply, ControlRequest

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


def parse_call(words: Sequence[str], given: Mapping[str, Any]) -> tuple[Command, dict[str, Any]]:
    """The command in these words, and its arguments from words and flags. Raises `ConfigError`."""
    if not words:
        raise ConfigError("ctl: give WORKER COMMAND [ARGUMENT…], --all COMMAND, list, or weights MODEL")
    name, *values = words
    command = next((known for known in COMMANDS if known == name), None)
    if command is None:
        raise ConfigError(f"ctl: there is no command {name!r}; commands are {', '.join(COMMANDS)}")
    places = POSITIONAL.get(command, ())
    if len(values) > len(places):
        takes = " ".join(place.upper() for place in places) or "no arguments"
        raise ConfigError(f"ctl: {command} takes {takes}, got {' '.join(values)}")
    arguments: dict[str, Any] = dict(zip(places, values))
    arguments |= {name: value for name, value in given.items() if value is not None}
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
            one["worker"],
            one["pool"],
            one.get("role", "?"),
            one["state"],
            one.get("load", {}).get("running", "-"),
            one.get("load", {}).get("waiting", "-"),
            f"{one['load']['used_blocks']}/{one['load']['total_blocks']}" if "load" in one else "-",
            one.get("epoch", "-"),
            ", ".join(one.get("loras", [])),
            ", ".join(one.get("taints", [])),
        )
        for one in workers
    ]
    print(
        table(
            ("worker", "pool", "role", "state", "running", "waiting", "blocks", "epoch", "loras", "taints"),
            rows,
        )
    )
    return 0
