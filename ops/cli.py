"""The `headwater` command."""

import argparse
import sys
import tempfile
from collections.abc import Callable

from headwater import __version__
from headwater.ops import config, ctl_command, nats_config_command

ACTOR = (*config.NATS, "namespace", "name", "drain_s", "metrics_port", "log_level", "log_format")
ENGINE = (
    "engine",
    "model",
    "served_model_name",
    "chat_template",
    "workers",
    "prefill_workers",
    "decode_workers",
    "block_size",
    "max_model_len",
    "kv_cache_mib",
    "dtype",
    *config.LORA,
    "sim_step_time",
    "sim_blocks",
    "native",
    "connector",
    "connector_options",
    "nixl_host",
    "nixl_port",
    "allow_mixed_versions",
    "allow_vulnerable_engine",
    "canary_s",
    "probe_idle_s",
    "probe_s",
)
ADMIN = ("admin_host", "admin_port", "admin_token_file")
UP = (
    *ENGINE,
    "gpus_per_worker",
    "local_prefill_tokens",
    "disaggregate",
    "metrics_port",
    "host",
    "port",
    *config.NATS,
    "data_dir",
    "cache_dir",
    "namespace",
    "drain_s",
    "record_payloads",
    *ADMIN,
    "log_level",
    "log_format",
)
STREAMS = (*config.NATS, "namespace", "log_level", "log_format")
LOG = (*config.NATS, "namespace", "pool", "log_level", "log_format")


def _up(arguments: argparse.Namespace) -> int:
    from headwater.ops import process, up

    settings = _settings(arguments)
    _need_vllm(settings)
    return process.run(lambda stop: up.up(settings, stop))


def _edge(arguments: argparse.Namespace) -> int:
    from headwater.ops import process, run_actor

    settings = _settings(arguments)
    return process.run(lambda stop: run_actor.run_edge(settings, stop))


def _router(arguments: argparse.Namespace) -> int:
    from headwater.ops import process, run_actor

    settings = _settings(arguments)
    return process.run(lambda stop: run_actor.run_router(settings, stop))


def _engine(arguments: argparse.Namespace) -> int:
    from headwater.ops import engine_command

    named = arguments.engine_name
    if named and arguments.engine not in (None, named):
        raise config.ConfigError(f"engine {named} and --engine {arguments.engine}: say it once")
    arguments.engine = named or arguments.engine
    settings = _settings(arguments)
    return engine_command.run(settings)


def _ctl(arguments: argparse.Namespace) -> int:
    arguments.log_level = arguments.log_level or "warning"
    return ctl_command.run(arguments, _settings(arguments))


def _admin(arguments: argparse.Namespace) -> int:
    from headwater.ops import admin, process

    settings = _settings(arguments)
    return process.run(lambda stop: admin.admin(settings, stop))


def _demo(arguments: argparse.Namespace) -> int:
    from headwater.ops import demo, process

    arguments.data_dir = arguments.data_dir or tempfile.mkdtemp(prefix="headwater-demo-")
    # Its own server and port: a demonstration disturbs nothing that runs.
    arguments.nats_port = arguments.nats_port or "0"
    arguments.port = arguments.port or "0"
    arguments.log_level = arguments.log_level or "warning"
    settings = _settings(arguments)
    _need_vllm(settings)
    return process.run(lambda stop: demo.demo(settings, stop))


def _replay(arguments: argparse.Namespace) -> int:
    from headwater.ops import process, replay

    settings = _settings(arguments)
    return process.run(
        lambda _: replay.replay(settings, verify=arguments.verify, bookmark=arguments.bookmark)
    )


def _snapshots(arguments: argparse.Namespace) -> int:
    from headwater.ops import process, snapshots

    settings = _settings(arguments)
    asked = {"bookmark": arguments.bookmark, "position": arguments.position, "drop": arguments.drop}
    if arguments.position is not None and not arguments.bookmark:
        raise config.ConfigError("--position says what --bookmark names; give both")
    return process.run(lambda _: snapshots.snapshots(settings, **asked))


def _log(arguments: argparse.Namespace) -> int:
    from headwater.ops import process, show

    settings = _settings(arguments)
    if arguments.json and not arguments.audit:
        raise config.ConfigError("--json is for --audit; give both")
    return process.run(
        lambda _: show.show_log(
            settings, audit=arguments.audit, requests=arguments.requests, as_json=arguments.json
        )
    )


def _explain(arguments: argparse.Namespace) -> int:
    from headwater.ops import process, show

    settings = _settings(arguments)
    return process.run(lambda _: show.explain(settings, arguments.request))


def _streams(arguments: argparse.Namespace) -> int:
    from headwater.ops import process, streams

    settings = _settings(arguments)
    return process.run(lambda _: streams.streams(settings, repair=arguments.repair, as_json=arguments.json))


def _pools(arguments: argparse.Namespace) -> int:
    from headwater.ops import pools, process

    settings = _settings(arguments)
    return process.run(lambda stop: pools.pools(settings, stop, watch=arguments.watch))


def _nats_config(arguments: argparse.Namespace) -> int:
    return nats_config_command.run(arguments, _settings(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    from headwater.ops.bench import report

    if arguments.what in ("hash", "index"):
        from headwater.ops.bench import hashing, index

        result = (hashing if arguments.what == "hash" else index).bench()
        report.show(result, as_json=arguments.json)
        return 0
    from headwater.ops import logging, process
    from headwater.ops.bench import edge, log, nixl, route, snapshot

    logging.configure("warning")
    benches = {
        "edge": edge.bench,
        "log": log.bench,
        "nixl": nixl.bench,
        "route": route.bench,
        "snapshot": snapshot.bench,
    }
    chosen = benches[arguments.what]

    async def run(_stop: object) -> int:
        report.show(await chosen(), as_json=arguments.json)
        return 0

    return process.run(run)


def _sim(arguments: argparse.Namespace) -> int:
    from headwater.ops.sim import command
    from headwater.ops.warm import compile_kernels

    compile_kernels()
    if arguments.seeds:
        return command.run_many(arguments.seeds, as_json=arguments.json, jobs=arguments.jobs)
    return command.run_one(arguments.seed, trace=arguments.trace, only=arguments.only, as_json=arguments.json)


def _warm(_arguments: argparse.Namespace) -> int:
    from headwater.ops import warm

    return warm.warm()


def _need_vllm(settings: config.Settings) -> None:
    """Go on in an environment that has vLLM, if this one has not and the settings ask for it."""
    from headwater.ops import bootstrap

    if settings.engine == "vllm" and bootstrap.needed():
        bootstrap.go_on_with_vllm(sys.argv[1:])


def _settings(arguments: argparse.Namespace) -> config.Settings:
    from headwater.ops import logging

    settings = config.resolve(arguments)
    logging.configure(settings.log_level, settings.log_format)
    return settings


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(prog="headwater", description="Serve LLMs from a fleet of engines.")
    top.add_argument("--version", action="version", version=f"headwater {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, text: str, names: tuple[str, ...], run: Callable[[argparse.Namespace], int]
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        config.add_flags(sub, names)
        sub.set_defaults(run=run)
        return sub

    add("up", "start a whole fleet on this machine", UP, _up)
    add("edge", "run one edge (HTTP endpoint)", (*ACTOR, "host", "port", "record_payloads"), _edge)
    add(
        "router",
        "run one router",
        (*ACTOR, "pool", "cache_dir", "local_prefill_tokens", "disaggregate"),
        _router,
    )
    engine = add("engine", "run engine workers", (*ACTOR, *ENGINE, "role", "cache_dir"), _engine)
    engine.add_argument(
        "engine_name",
        nargs="?",
        choices=("vllm", "sim"),
        help="the same as --engine; vLLM's own arguments may follow behind `--`",
    )
    add("demo", "start a fleet, ask three questions, show where they went and why", UP, _demo)
    replay = add("replay", "fold a pool's log again", LOG, _replay)
    replay.add_argument("--verify", action="store_true", help="make every decision again and compare")
    replay.add_argument(
        "--from", dest="bookmark", default="", metavar="BOOKMARK", help="start at the snapshot of this name"
    )
    kept = add("snapshots", "list a pool's snapshots, or name one to keep it", LOG, _snapshots)
    one = kept.add_mutually_exclusive_group()
    one.add_argument(
        "--bookmark", default="", metavar="NAME", help="keep a snapshot under this name for ever"
    )
    one.add_argument("--drop", default="", metavar="NAME", help="forget a name")
    kept.add_argument(
        "--position", type=int, default=None, help="which one --bookmark names (default: the newest)"
    )
    log = add("log", "count a pool log's events", LOG, _log)
    log.add_argument("--requests", action="store_true", help="count those of the request log")
    log.add_argument("--audit", action="store_true", help="list who had workers do what, instead")
    log.add_argument("--json", action="store_true", help="print JSON (with --audit: one line each)")
    ctl_command.add_flags(add("ctl", "control workers: drain, sleep, wake, role, adapters, …", STREAMS, _ctl))
    add("admin", "run the admin port: control over HTTP", (*STREAMS, "name", *ADMIN), _admin)
    explain = add("explain", "why a request went where it went", LOG, _explain)
    explain.add_argument("request", metavar="REQUEST", help="request id, as in the header x-request-id")
    streams = add("streams", "every stream: how full, and whether it is as it should be", STREAMS, _streams)
    streams.add_argument("--repair", action="store_true", help="create and alter what loses nothing")
    streams.add_argument("--json", action="store_true", help="print JSON")
    pools = add("pools", "make the namespace's streams and the logs of its pools, and list them", LOG, _pools)
    pools.add_argument("--watch", action="store_true", help="go on, for pools that come later")
    nats_config_command.add_flags(
        add(
            "nats-config",
            "make a nats.conf in which each kind of actor may do what it needs, and no more",
            ("namespace", "nats_port"),
            _nats_config,
        )
    )
    bench = commands.add_parser("bench", help="measure this machine")
    bench.add_argument("what", choices=("hash", "index", "edge", "route", "snapshot", "log", "nixl"))
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.set_defaults(run=_bench)
    sim = commands.add_parser("sim", help="run a simulated fleet under faults from a seed, on virtual time")
    which = sim.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run this seed")
    which.add_argument("--seeds", metavar="FROM:TO", help="run many seeds on all cores; 1 if any fails")
    sim.add_argument("--trace", action="store_true", help="print everything that happens")
    sim.add_argument("--only", default="", metavar="N,…", help="of the seed's faults only these, or none")
    sim.add_argument("--jobs", type=int, default=0, help="processes for --seeds (default: one per core)")
    sim.add_argument("--json", action="store_true", help="print JSON")
    sim.set_defaults(run=_sim)
    add("warm", "compile and cache what a first start would", (), _warm)
    return top


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Our words, and those of the engine behind `--`."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def main() -> int:
    """Entry point. Problems that a user can mend are one line on standard error and exit code 2."""
    ours, behind = _split(sys.argv[1:])
    top = parser()
    arguments = top.parse_args(ours)
    if behind and not hasattr(arguments, "native"):
        top.error(f"headwater {arguments.command} takes no engine's arguments: nothing may follow `--`")
    arguments.behind = behind
    try:
        code: int = arguments.run(arguments)
        return code
    except Exception as error:
        from headwater.engines.engine import EngineError
        from headwater.events.errors import LogError
        from headwater.ops.nats_server import ServerUnavailable
        from headwater.schemas.names import InvalidName

        if isinstance(error, config.ConfigError | EngineError | InvalidName | LogError | ServerUnavailable):
            print(f"headwater: {error}", file=sys.stderr)
            return 2
        raise


if __name__ == "__main__":
    sys.exit(main())
