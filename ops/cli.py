"""The `headwater` command."""

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable

from headwater import __version__
from headwater.ops import commands, config, ctl_command, nats_config_command
from headwater.ops.whatif import flags as whatif_flags

ACTOR = (*config.NATS, "namespace", "name", "drain_s", "metrics_port", "log_level", "log_format")
ENGINE = (
    "engine",
    "model",
    "served_model_name",
    "chat_template",
    "model_aliases",
    "logits_processors",
    "workers",
    "prefill_workers",
    "decode_workers",
    "tier",
    "taint",
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
    "name",
    "gpus_per_worker",
    *config.ROUTING,
    "metrics_port",
    "host",
    "port",
    *config.NATS,
    "data_dir",
    "cache_dir",
    "namespace",
    "drain_s",
    "record_payloads",
    *config.QUEUE,
    *config.CLIENTS,
    *config.HTTP,
    *ADMIN,
    "log_level",
    "log_format",
)
STREAMS = (*config.NATS, "namespace", "log_level", "log_format")
WHATIF = (
    "run a trace through the router and simulated engines with other settings, side by side, on virtual time"
)
TUNE = "search the router's weights on a trace or a recorded log, and say what they would gain"
LOG = config.LOG_SETTINGS


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(prog="headwater", description="Serve LLMs from a fleet of engines.")
    top.add_argument("--version", action="version", version=f"headwater {__version__}")
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, text: str, names: tuple[str, ...], run: Callable[[argparse.Namespace], int]
    ) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=text, description=text)
        config.add_flags(sub, names)
        sub.set_defaults(run=run)
        return sub

    add("up", "start a whole fleet on this machine", UP, commands.run_up)
    add(
        "edge",
        "run one edge (HTTP endpoint)",
        (*ACTOR, "host", "port", "record_payloads", *config.CLIENTS, *config.HTTP),
        commands.run_edge,
    )
    add(
        "router",
        "run one router",
        (*ACTOR, "pool", "cache_dir", *config.ROUTING, *config.QUEUE),
        commands.run_router,
    )
    shadow = add(
        "shadow",
        "run another policy beside a pool's routers, and record what it would have chosen",
        (*ACTOR, "pool", "cache_dir"),
        commands.run_shadow,
    )
    shadow.add_argument(
        "--policy",
        dest="shadow_policy",
        required=True,
        help="what decides in the shadow, such as round_robin",
    )
    shadow.add_argument(
        "--judge", dest="shadow_judge", default="kv", help="policy whose costs choices are judged by"
    )
    engine = add("engine", "run engine workers", (*ACTOR, *ENGINE, "role", "cache_dir"), commands.run_engine)
    engine.add_argument(
        "engine_name",
        nargs="?",
        choices=("vllm", "sim"),
        help="the same as --engine; vLLM's own arguments may follow behind `--`",
    )
    add("demo", "start a fleet, ask three questions, show where they went and why", UP, commands.run_demo)
    replay = add("replay", "fold a pool's log again", LOG, commands.run_replay)
    replay.add_argument("--verify", action="store_true", help="make every decision again and compare")
    replay.add_argument(
        "--from", dest="bookmark", default="", metavar="BOOKMARK", help="start at the snapshot of this name"
    )
    kept = add("snapshots", "list a pool's snapshots, or name one to keep it", LOG, commands.run_snapshots)
    one = kept.add_mutually_exclusive_group()
    one.add_argument(
        "--bookmark", default="", metavar="NAME", help="keep a snapshot under this name for ever"
    )
    one.add_argument("--drop", default="", metavar="NAME", help="forget a name")
    kept.add_argument(
        "--position", type=int, default=None, help="which one --bookmark names (default: the newest)"
    )
    log = add("log", "count a pool log's events", LOG, commands.run_log)
    log.add_argument("--requests", action="store_true", help="count those of the request log")
    log.add_argument("--audit", action="store_true", help="list who had workers do what, instead")
    log.add_argument("--json", action="store_true", help="print JSON (with --audit: one line each)")
    ctl_command.add_flags(
        add("ctl", "control workers: drain, sleep, wake, role, adapters, …", STREAMS, commands.run_ctl)
    )
    add("admin", "run the admin port: control over HTTP", (*STREAMS, "name", *ADMIN), commands.run_admin)
    explain = add("explain", "why a request went where it went", LOG, commands.run_explain)
    explain.add_argument("request", metavar="REQUEST", help="request id, as in the header x-request-id")
    tree = add("tree", "what a pool's workers hold, as a tree of prefixes", LOG, commands.run_tree)
    tree.add_argument(
        "--worker", default="", metavar="W", help="only what this worker holds, and what leads there"
    )
    tree.add_argument(
        "--depth", type=int, default=-1, metavar="D", help="only what begins before block D of a prompt"
    )
    tree.add_argument("--limit", type=int, default=50, metavar="N", help="at most so many runs, the largest")
    tree.add_argument("--json", action="store_true", help="print JSON")
    streams = add(
        "streams", "every stream: how full, and whether it is as it should be", STREAMS, commands.run_streams
    )
    streams.add_argument("--repair", action="store_true", help="create and alter what loses nothing")
    streams.add_argument("--json", action="store_true", help="print JSON")
    pools = add(
        "pools",
        "make the namespace's streams and the logs of its pools, and list them",
        LOG,
        commands.run_pools,
    )
    pools.add_argument("--watch", action="store_true", help="go on, for pools that come later")
    nats_config_command.add_flags(
        add(
            "nats-config",
            "make a nats.conf in which each kind of actor may do what it needs, and no more",
            ("namespace", "nats_port"),
            commands.run_nats_config,
        )
    )
    bench = subparsers.add_parser("bench", help="measure this machine")
    bench.add_argument(
        "what", choices=("hash", "index", "edge", "route", "snapshot", "log", "nixl", "whatif")
    )
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.add_argument(
        "--peer", action="store_true", help="with index: the same on a peer's, if it is installed"
    )
    bench.set_defaults(run=commands.run_bench)
    sim = subparsers.add_parser("sim", help="run a simulated fleet under faults from a seed, on virtual time")
    which = sim.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run this seed")
    which.add_argument("--seeds", metavar="FROM:TO", help="run many seeds on all cores; 1 if any fails")
    sim.add_argument("--trace", action="store_true", help="print everything that happens")
    sim.add_argument("--only", default="", metavar="N,…", help="of the seed's faults only these, or none")
    sim.add_argument("--jobs", type=int, default=0, help="processes for --seeds (default: one per core)")
    sim.add_argument("--json", action="store_true", help="print JSON")
    sim.set_defaults(run=commands.run_sim)
    whatif_flags.add_flags(add("whatif", WHATIF, LOG, commands.run_whatif))
    whatif_flags.add_tune_flags(add("tune", TUNE, LOG, commands.run_tune))
    add("warm", "compile and cache what a first start would", (), commands.run_warm)
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
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Nobody reads on: what is left in the buffer must not fail again on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        where = error.filename or "the output"
        print(f"headwater: cannot write to {where}: {error.strerror}", file=sys.stderr)
        return 2
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
