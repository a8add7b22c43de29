"""`headwater ctl`: control commands to workers, from a terminal."""

import argparse
import asyncio
import getpass
import os
import socket
import sys
from typing import Any, Final

import msgspec

from headwater.actors.control_client import control, leased, roster
from headwater.actors.world import World
from headwater.ops.access import controller
from headwater.ops.config import ConfigError, Settings
from headwater.ops.run_actor import world_of
from headwater.ops.tables import table
from headwater.schemas.control import COMMANDS, Command, ControlReply, ControlRequest

POSITIONAL: Final[dict[str, tuple[str, ...]]] = {
    "role": ("role",),
    "load-lora": ("name", "source"),
    "unload-lora": ("name",),
    "taint": ("name",),
    "untaint": ("name",),
}
"""Arguments that are written without a flag, in this order."""

FLAGS: Final = ("level", "mode", "within_s", "forget")


async def ctl(settings: Settings, arguments: argparse.Namespace) -> int:
    """Run it. 0 if every worker asked did it; else 1, and why on standard error. Raises `ConfigError`."""
    everyone, words = bool(arguments.all), list(arguments.words)
    by = arguments.by or whoami()
    async with world_of(settings, controller(settings), "ctl") as world:
        if words == ["list"] and not everyone:
            return await _list(world, by, as_json=arguments.json)
        names = [] if everyone else words[:1]
        command, given = asked(words if everyone else words[1:], arguments)
        if everyone:
            names = sorted(await leased(world))
            if not names:
                print("headwater ctl: no worker has a lease", file=sys.stderr)
                return 1
        request = ControlRequest(command, given, by)
        replies = await asyncio.gather(
            *(control(world, name, request, within_s=arguments.timeout) for name in names)
        )
    for name, reply in zip(names, replies, strict=True):
        _show(name, reply, as_json=arguments.json)
    return 0 if all(reply.status == 200 for reply in replies) else 1


def asked(words: list[str], arguments: argparse.Namespace) -> tuple[Command, dict[str, Any]]:
    """The command in these words, and its arguments from words and flags. Raises `ConfigError`."""
    if not words:
        raise ConfigError("ctl WORKER COMMAND [ARGS…], or ctl --all COMMAND, or ctl list")
    name, *values = words
    command = next((known for known in COMMANDS if known == name), None)
    if command is None:
        raise ConfigError(f"ctl: there is no command {name!r}; known are {', '.join(COMMANDS)}")
    places = POSITIONAL.get(command, ())
    if len(values) > len(places):
        takes = " ".join(place.upper() for place in places) or "no words"
        raise ConfigError(f"ctl: {command} takes {takes}, and got {' '.join(values)}")
    given: dict[str, Any] = dict(zip(places, values))
    given |= {flag: getattr(arguments, flag) for flag in FLAGS if getattr(arguments, flag) is not None}
    return command, given


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


async def _list(world: World, by: str, *, as_json: bool) -> int:
    workers = await roster(world, by)
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
