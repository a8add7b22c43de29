"""Measurements that only people who work on Headwater run: `python -m tests.bench NAME [--json]`. What users run is `headwater bench`."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import get_args, get_origin, get_type_hints

from msgspec import Meta

from headwater.engines import logs
from headwater.ops.bench import report
from headwater.ops.config.setting import ConfigError
from tests.bench import index_peer, limits, whatif
from tests.bench.media.bench import bench as media
from tests.bench.parsers import bench as parsers
from tests.bench.staleness import replicas, signal_age
from tests.bench.zoo import command as zoo
from tests.bench.zoo.options import ZooOptions


def _numbers(text: str) -> list[int]:
    """Numbers from 1, separated by commas."""
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    for name, text in (
        ("index", "the router's prefix index and NVIDIA Dynamo's, with ai-dynamo-runtime installed"),
        ("limits", "rate limits over several edges, simulated"),
        ("media", "how long an image in flight keeps the edge's event loop from others"),
        ("parsers", "the output parsers on recorded outputs of models"),
        ("whatif", "the router on the public trace, compared with a peer's figures"),
        ("zoo", "the router on classes of synthetic traffic"),
        ("signal-age", "what late events cost, simulated"),
        ("replicas", "several routers that fold one log, simulated"),
    ):
        commands.add_parser(name, help=text).add_argument("--json", action="store_true", help="print JSON")
    several = commands.choices["replicas"]
    several.add_argument(
        "--routers", type=_numbers, default=[1, 2, 4, 8], help="the first is what others are compared with"
    )
    several.add_argument("--requests", type=int, default=20_000, help="about how many")
    classes = commands.choices["zoo"]
    classes.add_argument("--workers", type=_numbers, default=[], help="sizes of the fleet (default 8,32,128)")
    classes.add_argument("--peer", action="store_true", help="also replay with ai-dynamo of this environment")
    for field, kind in get_type_hints(ZooOptions, include_extras=True).items():
        (of, meta) = get_args(kind)
        assert isinstance(meta, Meta)
        default, flag = ZooOptions._field_defaults[field], f"--{field.replace('_', '-')}"
        if get_origin(of) is tuple:
            classes.add_argument(flag, action="append", default=[], help=meta.description)
        else:
            classes.add_argument(
                flag, type=of, default=default, help=f"{meta.description} (default {default!r})"
            )
    return parser


def main(line: Sequence[str] | None = None) -> int:
    """Measure, and print the report."""
    given = vars(_parser().parse_args(line))
    name, as_json = given.pop("name"), given.pop("json")
    logs.configure("warning")
    try:
        if name == "zoo":
            workers, peer = given.pop("workers"), given.pop("peer")
            given["peer_python"] = tuple(given["peer_python"])
            zoo.run(ZooOptions(**given), workers, peer=peer, as_json=as_json)
        elif name == "whatif":
            whatif.show(whatif.bench(), as_json=as_json)
        elif name == "signal-age":
            signal_age.show(signal_age.bench(), as_json=as_json)
        elif name == "replicas":
            replicas.show(replicas.bench(given["routers"], requests=given["requests"]), as_json=as_json)
        elif name == "media":
            report.show(asyncio.run(media()), as_json=as_json)
        elif name == "index":
            report.show(index_peer.bench(), as_json=as_json)
        else:
            report.show({"limits": limits, "parsers": parsers}[name].bench(), as_json=as_json)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
