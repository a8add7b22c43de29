"""`headwater nats-config`: the configuration of a NATS server with limited permissions."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from headwater.ops.config.command import Key, command
from headwater.ops.config.setting import Flag
from headwater.schemas.permissions import DUTIES

NOTES = "\n".join(("Users:", "", *(f"  {kind:9} {duty}" for kind, duty in DUTIES.items())))


@command(notes=NOTES)
def nats_config(
    *,
    namespace: Annotated[str, Key("nats.namespace")],
    port: Annotated[int, Key("nats.port")],
    out: Annotated[str, Meta(description="folder for the files, with keys (default: print them)")] = "",
    auth: Annotated[Literal["nkey", "password", "none"], Meta(description="how users log in")] = "nkey",
    actors: Annotated[
        tuple[str, ...],
        Flag("actor"),
        Meta(description="KIND:NAME, a user for this process only; repeatable"),
    ] = (),
    pools: Annotated[
        tuple[str, ...], Flag("pool"), Meta(description="a pool that may exist (default: any); repeatable")
    ] = (),
    servers: Annotated[Literal[1, 3, 5], Meta(description="servers of the cluster")] = 1,
    hosts: Annotated[
        str,
        Meta(description="addresses that the servers listen on, comma-separated: one each, or one for all"),
    ] = "127.0.0.1",
    store: Annotated[str, Meta(description="folder of JetStream's storage")] = "nats-data",
    tls_cert: Annotated[str, Meta(description="the servers' certificate, PEM")] = "",
    tls_key: Annotated[str, Meta(description="private key of the certificate, PEM")] = "",
    tls_ca: Annotated[str, Meta(description="CA certificates, PEM")] = "",
    tls_verify: Annotated[bool, Meta(description="require client certificates")] = False,
) -> int:
    """Write a nats.conf that grants each kind of process only the permissions it needs.

    Without --out the configuration is printed, and the keys on standard error.
    """
    from headwater.ops.nats import config

    wanted = config.Wanted(
        namespace,
        auth,
        actors,
        pools,
        servers,
        tuple(hosts.split(",")),
        port,
        store,
        tls_cert,
        tls_key,
        tls_ca,
        tls_verify,
    )
    if out:
        for name in config.write(wanted, Path(out)):
            print(f"{out}/{name}")
        return 0
    made = config.make(wanted, {})
    for name, text in made.configurations.items():
        if len(made.configurations) > 1:
            print(f"# ---- {name}")
        print(text, end="")
    # Keys are stored only if asked for, and the configuration is useless without them.
    for name, text in made.secrets.items():
        if not name.endswith(".env"):
            print(f"{name}: {text.strip()}", file=sys.stderr)
    return 0
