"""The options of `headwater whatif` and `headwater tune`. Apart, so that the command line is read without what runs it."""

import argparse

COUNTS = {
    "workers": "workers that do both legs (default: 8, or 0 beside --prefill-workers and --decode-workers)",
    "prefill_workers": "workers that only compute prompts",
    "decode_workers": "workers that only go on behind prompts computed elsewhere",
    "blocks": "KV blocks of each worker (default: 4000)",
    "block_size": "tokens of a block (default: 512)",
    "step_tokens": "tokens that a worker computes in one step at most (default: 8192)",
    "sequences": "requests that a worker runs at once at most (default: 256)",
    "busy_prefill_tokens": "the router gives a worker nothing more above so many prompt tokens to compute, 0: no limit "
    "(default: with policy kv the router's, 131072; the others stand for routers without a queue)",
    "busy_waiting": "nor above so many requests that wait at it, 0: no limit (default: 0)",
    "bytes_a_token": "KV bytes of one token, for what a hand-off costs (default: 131072, an 8B-class model)",
}
NUMBERS = {
    "speed": "divides arrival times (default: 1)",
    "temperature": "of the choice between workers (default: the router's own)",
    "busy_kv": "nor while its requests hold more than this share of its blocks, 0: no limit (default: 0)",
    "queue_wait_s": "how long a request may wait at the router while all workers are busy (default: 120)",
    "gigabytes_a_second": "what a hand-off gets of a link between workers (default: 20)",
}
NOT_NEGATIVE = (
    "busy_prefill_tokens",
    "busy_waiting",
    "busy_kv",
    "workers",
    "prefill_workers",
    "decode_workers",
    "temperature",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`headwater whatif`. An option given several times makes columns; one given once holds for all of them."""
    _add_run(parser)
    parser.add_argument(
        "--plot", default="", metavar="FILE", help="write a plot of all columns there, as SVG"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON: a list with one object a column; with --log an object with that list",
    )


def add_tune_flags(parser: argparse.ArgumentParser) -> None:
    """`headwater tune`: the same settings, each once, and how to search."""
    _add_run(parser)
    parser.add_argument(
        "--search",
        default="crowding,retain,memory",
        metavar="NAME,…",
        help="the weights to search (default: crowding,retain,memory)",
    )
    parser.add_argument(
        "--objective",
        default="ttft_mean",
        metavar="NAME",
        help="what shall get better: ttft_mean (default), ttft_p50, ttft_p99, itl_mean, e2e_mean or reuse",
    )
    parser.add_argument(
        "--guard",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="by how much the other times may get worse (default: 0.02)",
    )
    parser.add_argument("--trials", type=int, default=40, metavar="N", help="runs to spend (default: 40)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (default: 0)")
    parser.add_argument(
        "--share",
        type=float,
        default=0.6,
        metavar="SHARE",
        help="of the requests to learn from, the first ones; the rest judge (default: 0.6)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_run(parser: argparse.ArgumentParser) -> None:
    """What is run, on what."""
    parser.add_argument(
        "trace", nargs="?", metavar="TRACE", help="a trace in Mooncake's format, .jsonl or .jsonl.gz"
    )
    parser.add_argument(
        "--log",
        action="store_true",
        help="in place of a trace, run a pool's log again: as it was, and with the settings given here",
    )
    parser.add_argument(
        "--policy", action="append", metavar="NAME", help="how the router chooses (default: kv)"
    )
    parser.add_argument(
        "--queue-order",
        action="append",
        choices=("fcfs", "shortest_uncached"),
        help="whose turn it is at the router (default: fcfs)",
    )
    for name, text in COUNTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="append", type=int, metavar="N", help=text)
    for name, text in NUMBERS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", action="append", type=float, metavar="X", help=text
        )
    parser.add_argument(
        "--weights",
        action="append",
        metavar="NAME=VALUE,…",
        help="the router's weights that differ from its defaults",
    )
    parser.add_argument(
        "--step-time",
        action="append",
        metavar="FILE|SIX",
        help="milliseconds of a step: prefill a*x^2+b*x+c for x tokens and decode d*p^2+e*p+f at p of the blocks in "
        "use, as a,b,c,d,e,f or a JSON file with prefill_ms and decode_ms",
    )
    parser.add_argument(
        "--requests", type=int, default=0, metavar="N", help="only the trace's first N requests"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once (default: 1)")
