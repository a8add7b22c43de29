"""What each `headwater` command does: its settings, then the module that does it, imported only now."""

import argparse
import sys
import tempfile

from headwater.ops import config, ctl_command, nats_config_command


def run_up(arguments: argparse.Namespace) -> int:
    """`headwater up`."""
    from headwater.ops import process, up

    settings = _settings(arguments)
    config.check_engine(settings)
    _need_vllm(settings)
    return process.run(lambda stop: up.up(settings, stop))


def run_edge(arguments: argparse.Namespace) -> int:
    """`headwater edge`."""
    from headwater.ops import process, run_actor

    settings = _settings(arguments)
    return process.run(lambda stop: run_actor.run_edge(settings, stop))


def run_router(arguments: argparse.Namespace) -> int:
    """`headwater router`."""
    from headwater.ops import process, run_actor

    settings = _settings(arguments)
    return process.run(lambda stop: run_actor.run_router(settings, stop))


def run_shadow(arguments: argparse.Namespace) -> int:
    """`headwater shadow`."""
    from headwater.ops import process, run_actor

    settings = _settings(arguments)
    policy, judge = arguments.shadow_policy, arguments.shadow_judge
    return process.run(lambda stop: run_actor.run_shadow(settings, policy, judge, stop))


def run_engine(arguments: argparse.Namespace) -> int:
    """`headwater engine`."""
    from headwater.ops import engine_command

    named = arguments.engine_name
    if named and arguments.engine not in (None, named):
        raise config.ConfigError(f"engine {named} and --engine {arguments.engine}: say it once")
    arguments.engine = named or arguments.engine
    settings = _settings(arguments)
    config.check_engine(settings)
    return engine_command.run(settings)


def run_ctl(arguments: argparse.Namespace) -> int:
    """`headwater ctl`."""
    arguments.log_level = arguments.log_level or "warning"
    return ctl_command.run(arguments, _settings(arguments))


def run_admin(arguments: argparse.Namespace) -> int:
    """`headwater admin`."""
    from headwater.ops import admin, process

    settings = _settings(arguments)
    return process.run(lambda stop: admin.admin(settings, stop))


def run_demo(arguments: argparse.Namespace) -> int:
    """`headwater demo`."""
    from headwater.ops import demo, process

    arguments.data_dir = arguments.data_dir or tempfile.mkdtemp(prefix="headwater-demo-")
    # Its own server and port: a demonstration disturbs nothing that runs.
    arguments.nats_port = arguments.nats_port or "0"
    arguments.port = arguments.port or "0"
    arguments.log_level = arguments.log_level or "warning"
    settings = _settings(arguments)
    _need_vllm(settings)
    return process.run(lambda stop: demo.demo(settings, stop))


def run_replay(arguments: argparse.Namespace) -> int:
    """`headwater replay`."""
    from headwater.ops import process, replay

    settings = _settings(arguments)
    return process.run(
        lambda _: replay.replay(settings, verify=arguments.verify, bookmark=arguments.bookmark)
    )


def run_snapshots(arguments: argparse.Namespace) -> int:
    """`headwater snapshots`."""
    from headwater.ops import process, snapshots

    settings = _settings(arguments)
    asked = {"bookmark": arguments.bookmark, "position": arguments.position, "drop": arguments.drop}
    if arguments.position is not None and not arguments.bookmark:
        raise config.ConfigError("--position says what --bookmark names; give both")
    return process.run(lambda _: snapshots.snapshots(settings, **asked))


def run_log(arguments: argparse.Namespace) -> int:
    """`headwater log`."""
    from headwater.ops import process, show

    settings = _settings(arguments)
    if arguments.json and not arguments.audit:
        raise config.ConfigError("--json is for --audit; give both")
    return process.run(
        lambda _: show.show_log(
            settings, audit=arguments.audit, requests=arguments.requests, as_json=arguments.json
        )
    )


def run_explain(arguments: argparse.Namespace) -> int:
    """`headwater explain`."""
    from headwater.ops import explain, process

    settings = _settings(arguments)
    return process.run(lambda _: explain.explain(settings, arguments.request))


def run_tree(arguments: argparse.Namespace) -> int:
    """`headwater tree`."""
    from headwater.ops import process, tree

    settings = _settings(arguments)
    return process.run(
        lambda _: tree.show_tree(
            settings,
            worker=arguments.worker,
            depth=arguments.depth,
            limit=arguments.limit,
            as_json=arguments.json,
        )
    )


def run_streams(arguments: argparse.Namespace) -> int:
    """`headwater streams`."""
    from headwater.ops import process, streams

    settings = _settings(arguments)
    return process.run(lambda _: streams.streams(settings, repair=arguments.repair, as_json=arguments.json))


def run_pools(arguments: argparse.Namespace) -> int:
    """`headwater pools`."""
    from headwater.ops import pools, process

    settings = _settings(arguments)
    return process.run(lambda stop: pools.pools(settings, stop, watch=arguments.watch))


def run_nats_config(arguments: argparse.Namespace) -> int:
    """`headwater nats-config`."""
    return nats_config_command.run(arguments, _settings(arguments))


def run_bench(arguments: argparse.Namespace) -> int:
    """`headwater bench`."""
    from headwater.ops.bench import report

    if arguments.peer and arguments.what != "index":
        raise config.ConfigError("--peer is for bench index")
    if arguments.what in ("hash", "index"):
        from headwater.ops.bench import hashing, index

        result = hashing.bench() if arguments.what == "hash" else index.bench(peer=arguments.peer)
        report.show(result, as_json=arguments.json)
        return 0
    if arguments.what == "whatif":
        from headwater.ops.bench import whatif

        whatif.show(whatif.bench(), as_json=arguments.json)
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


def run_sim(arguments: argparse.Namespace) -> int:
    """`headwater sim`."""
    from headwater.ops.sim import command
    from headwater.ops.warm import compile_kernels

    compile_kernels()
    if arguments.seeds:
        return command.run_many(arguments.seeds, as_json=arguments.json, jobs=arguments.jobs)
    return command.run_one(arguments.seed, trace=arguments.trace, only=arguments.only, as_json=arguments.json)


def run_whatif(arguments: argparse.Namespace) -> int:
    """`headwater whatif`."""
    from headwater.ops import process
    from headwater.ops.whatif import command

    if not arguments.log:
        return command.execute(arguments)
    settings = _settings(_connecting(arguments))
    return process.run(lambda _: command.execute_log(arguments, settings))


def run_tune(arguments: argparse.Namespace) -> int:
    """`headwater tune`."""
    from headwater.ops import process
    from headwater.ops.whatif import tune_command

    if not arguments.log:
        return tune_command.execute(arguments)
    settings = _settings(_connecting(arguments))
    return process.run(lambda _: tune_command.execute_log(arguments, settings))


def _connecting(arguments: argparse.Namespace) -> argparse.Namespace:
    """Only what connects: other settings have names that mean something else to these commands."""
    return argparse.Namespace(**{name: getattr(arguments, name) for name in ("config", *config.LOG_SETTINGS)})


def run_warm(_arguments: argparse.Namespace) -> int:
    """`headwater warm`."""
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
