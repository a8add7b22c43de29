"""Files of fleets for tests, made from files that this machine cannot run as they are: for it alone, and with other models."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headwater.ops.launch.fleet_file import FleetFile, PoolOfModel
from headwater.ops.start.sockets import free_port

ChangePool = Callable[[str, PoolOfModel], PoolOfModel]


def written(fleet: FleetFile, folder: Path, change: ChangePool, machines: Sequence[str] = ()) -> Path:
    """Write a file of the same pools, each as `change` makes it, with ports and a data folder of their own; returns it.

    `machines` are the lines of hosts and NATS, without which all is on this machine.
    """
    lines = [
        f'data_dir = "{folder}/data"',
        f"edges.count = {fleet.edges.count}",
        f"edges.settings.http.port = {free_port(0)}",
        "console.count = 0",
        *(machines or [f"nats.port = {free_port(0)}"]),
    ]
    for name, pool in fleet.pools.items():
        made = msgspec.to_builtins(change(name, pool))
        workers = made.pop("workers")
        lines += [f'[pools."{name}"]', *_flat(made)]
        for one in workers:
            lines += [f'[[pools."{name}".workers]]', *_flat(one)]
    path = folder / "fleet.toml"
    path.write_text("\n".join(lines))
    return path


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name} = {json.dumps(value)}"
