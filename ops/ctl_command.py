"""The command line of `headwater ctl`. Imports little: every command loads it."""

import argparse

from headwater.ops.config import Settings
from headwater.schemas.control import COMMANDS


def add_flags(sub: argparse.ArgumentParser) -> None:
    """Its flags and words, and in the help every command."""
    sub.formatter_class = argparse.RawDescriptionHelpFormatter
    sub.epilog = "\n".join(
        (
            "commands:",
            *(f"  {name:14} {text}" for name, text in COMMANDS.items()),
            "",
            "  headwater ctl list",
            "  headwater ctl worker-0 sleep --level 1",
            "  headwater ctl worker-0 load-lora NAME SOURCE",
            "  headwater ctl worker-0 role prefill",
            "  headwater ctl worker-0 taint batch",
            "  headwater ctl --all drain",
        )
    )
    sub.add_argument("words", nargs="*", metavar="WORKER COMMAND [ARGS…]", help="or `list`: who is there")
    sub.add_argument("--all", action="store_true", help="every worker that has a lease")
    sub.add_argument("--level", type=int, help="sleep: 1 keeps the weights in host memory, 2 drops them")
    sub.add_argument("--mode", help="pause: abort, wait or keep what runs")
    sub.add_argument(
        "--within-s", type=float, help="sleep, pause, drain, stop: what still runs then goes on elsewhere"
    )
    sub.add_argument(
        "--forget",
        action="store_const",
        const=True,
        default=None,
        help="unload-lora: everywhere, so that no request loads it again",
    )
    sub.add_argument("--by", default="", help="who asks, for the audit (default: user@host)")
    sub.add_argument("--timeout", type=float, default=900.0, metavar="S", help="wait so long for the end")
    sub.add_argument("--json", action="store_true", help="print JSON, one line per worker")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """See `headwater.ops.ctl.ctl`."""
    from headwater.ops import ctl, process

    return process.run(lambda _: ctl.ctl(settings, arguments))
