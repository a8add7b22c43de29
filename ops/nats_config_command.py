"""The command line of `headwater nats-config`. Imports little: every command loads it."""

import argparse
import sys
from pathlib import Path

from headwater.ops.config import Settings
from headwater.schemas.permissions import DUTIES


def add_flags(sub: argparse.ArgumentParser) -> None:
    """Its flags, and in the help what each user may do."""
    sub.formatter_class = argparse.RawDescriptionHelpFormatter
    sub.epilog = "users:\n" + "\n".join(f"  {kind:9} {duty}" for kind, duty in DUTIES.items())
    sub.add_argument("--out", default="", metavar="FOLDER", help="write there, with keys (default: print)")
    sub.add_argument("--auth", default="nkey", choices=("nkey", "password", "none"), help="how users log in")
    sub.add_argument(
        "--actor",
        dest="actors",
        action="append",
        default=[],
        metavar="KIND:NAME",
        help="a user of its own, for this actor only",
    )
    sub.add_argument(
        "--pool",
        dest="pools",
        action="append",
        default=[],
        metavar="POOL",
        help="a pool there may be (default: any)",
    )
    sub.add_argument("--servers", type=int, default=1, choices=(1, 3, 5), help="servers of a cluster")
    sub.add_argument(
        "--hosts", default="127.0.0.1", metavar="HOST,…", help="where they listen, one each or one for all"
    )
    sub.add_argument("--store", default="nats-data", metavar="FOLDER", help="what JetStream keeps is there")
    sub.add_argument("--tls-cert", default="", metavar="FILE", help="the servers' certificate, PEM")
    sub.add_argument("--tls-key", default="", metavar="FILE", help="its private key, PEM")
    sub.add_argument("--tls-ca", default="", metavar="FILE", help="authority of certificates, PEM")
    sub.add_argument("--tls-verify", action="store_true", help="clients must show a certificate too")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Write the files and print their names; without --out print the configuration, and the keys on stderr."""
    from headwater.ops import nats_config

    wanted = nats_config.Wanted(
        settings.namespace,
        arguments.auth,
        tuple(arguments.actors),
        tuple(arguments.pools),
        arguments.servers,
        tuple(arguments.hosts.split(",")),
        settings.nats_port,
        arguments.store,
        arguments.tls_cert,
        arguments.tls_key,
        arguments.tls_ca,
        arguments.tls_verify,
    )
    if arguments.out:
        for name in nats_config.write(wanted, Path(arguments.out)):
            print(f"{arguments.out}/{name}")
        return 0
    made = nats_config.make(wanted, {})
    for name, text in made.configurations.items():
        if len(made.configurations) > 1:
            print(f"# ---- {name}")
        print(text, end="")
    # Keys are never kept unasked: without them the configuration is of no use, so here they are.
    for name, text in made.secrets.items():
        if not name.endswith(".env"):
            print(f"{name}: {text.strip()}", file=sys.stderr)
    return 0
