"""Commands for a running fleet, its streams and its server, and for this machine."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from headwater.ops.config.command import Json, Key, Process, command
from headwater.ops.config.processes import ClientSettings, PoolOperator, StreamOperator
from headwater.ops.config.setting import Flag
from headwater.schemas.control import COMMANDS
from headwater.schemas.permissions import DUTIES

if TYPE_CHECKING:
    from headwater.ops.nats.config import Wanted

COMMAND_NOTES = "\n".join(
    (
        "Commands:",
        "",
        *(f"  {name:14} {text}" for name, text in COMMANDS.items()),
        "",
        "For example:",
        "",
        "  headwater ctl list",
        "  headwater ctl worker-0 sleep --level 1",
        "  headwater ctl worker-0 load-lora NAME SOURCE",
        "  headwater ctl worker-0 role prefill",
        "  headwater ctl worker-0 taint batch",
        "  headwater ctl --all drain",
        "",
        "Engine weights are the shares of a model's new requests that its engines get:",
        "",
        "  headwater ctl weights MODEL                            show them",
        "  headwater ctl weights MODEL vllm=0.95 sglang=0.05      set them; an engine without one gets none",
        "  headwater ctl weights MODEL remove                     remove them: any worker may get any request",
    )
)


@command(defaults={"log.level": "warning"}, notes=COMMAND_NOTES)
async def ctl(
    *words: Annotated[
        str,
        Meta(
            description="WORKER COMMAND [ARGUMENT…], COMMAND [ARGUMENT…] with --all, list, "
            "or weights MODEL [ENGINE=WEIGHT… | remove]"
        ),
    ],
    everyone: Annotated[bool, Flag("all"), Meta(description="every worker that has a lease")] = False,
    level: Annotated[
        int | None, Meta(description="sleep: 1 keeps the weights in host memory, 2 discards them")
    ] = None,
    mode: Annotated[str | None, Meta(description="pause: abort, wait or keep in-flight requests")] = None,
    drain_timeout: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="sleep, pause, drain, stop: seconds that in-flight requests have to finish; then they migrate",
        ),
    ] = None,
    forget: Annotated[
        bool, Meta(description="unload-lora: on all workers, so that no request loads it again")
    ] = False,
    by: Annotated[str, Meta(description="name for the audit log (default: user@host)")] = "",
    timeout: Annotated[float, Meta(gt=0, description="seconds to wait for completion")] = 900.0,
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON, one line per worker")] = False,
    settings: ClientSettings,
) -> int:
    """Control workers: drain, sleep, wake, role, adapters, …"""
    from headwater.ops.operator import ctl as control

    if words[:1] == ("weights",) and not everyone:
        by = by or control.whoami()
        return await control.weigh(settings.nats, words[1:], by, as_json=as_json)
    arguments = {"level": level, "mode": mode, "within_s": drain_timeout, "forget": forget or None}
    call = control.ControlCall(words, arguments, everyone, by, timeout, as_json)
    return await control.ctl(settings.nats, call)


@command
async def streams(
    settings: StreamOperator,
    *,
    repair: Annotated[bool, Meta(description="create and alter streams where nothing is lost by it")] = False,
    promote: Annotated[
        bool, Meta(description="make the mirrors of a site that is lost for good the originals")
    ] = False,
    as_json: Json = False,
) -> int:
    """List all streams of the namespace: size, health, and differences from their wanted configuration."""
    from headwater.ops.operator import mirrors
    from headwater.ops.operator import streams as operator

    if promote:
        return await mirrors.promote_all(settings.nats, settings.streams)
    return await operator.streams(settings.nats, settings.streams, repair=repair, as_json=as_json)


@command
def pools(
    settings: PoolOperator,
    *,
    watch: Annotated[bool, Meta(description="keep running, and create the logs of new pools")] = False,
) -> Process:
    """Create the namespace's streams and the logs of its pools, and list them."""
    from headwater.ops.operator import streams as operator

    return lambda stop: operator.create_pools(settings, stop, watch=watch)


@command(
    notes="For example:\n\n  headwater mirror site-a --nats nats://HUB:4222        all but KV-cache events\n"
    "  headwater mirror site-a --nats nats://HUB:4222 --kv   everything that a replay needs"
)
def mirror(
    site: Annotated[
        str,
        Meta(description="the site: its namespace, and the JetStream domain of its servers, have this name"),
    ],
    settings: StreamOperator,
    *,
    kv: Annotated[
        bool,
        Meta(
            description="KV-cache events and snapshots, too: `replay` needs them, and they are most of a log"
        ),
    ] = False,
    requests: Annotated[bool, Meta(description="the request log, too")] = False,
    anew: Annotated[
        bool, Meta(description="drop what these servers have and the site has not, and copy again")
    ] = False,
    watch: Annotated[bool, Meta(description="keep running, and mirror new pools")] = False,
) -> Process:
    """Keep copies of a site's streams on the NATS servers of a hub, which are its leaf nodes' other end."""
    from headwater.ops.operator import mirrors

    return lambda stop: mirrors.mirror(
        settings.nats, settings.streams, site, stop, kv=kv, requests=requests, anew=anew, watch=watch
    )


Actors = Annotated[
    tuple[str, ...],
    Flag("actor"),
    Meta(description="KIND:NAME, a user for this process only; repeatable"),
]
Hosts = Annotated[
    str,
    Meta(description="addresses that the servers listen on, comma-separated: one each, or one for all"),
]
Sites = Annotated[
    tuple[str, ...],
    Flag("site"),
    Meta(description="a site whose servers are leaf nodes of these, which are a hub; repeatable"),
]
LeafPort = Annotated[
    Annotated[int, Meta(ge=1, le=65535)],
    Meta(description="with --site: port on which a hub's servers accept leaf nodes"),
]
Hub = Annotated[
    str,
    Meta(
        description="HOST:PORT of a hub's servers for leaf nodes, comma-separated: these servers are those of the site named like --namespace"
    ),
]

USER_NOTES = "\n".join(("Users:", "", *(f"  {kind:9} {duty}" for kind, duty in DUTIES.items())))


@command(notes=USER_NOTES)
def nats_config(
    *,
    namespace: Annotated[str, Key("nats.namespace")],
    port: Annotated[int, Key("nats.port")],
    out: Annotated[str, Meta(description="folder for the files, with keys (default: print them)")] = "",
    auth: Annotated[Literal["nkey", "password", "none"], Meta(description="how users log in")] = "nkey",
    actors: Actors = (),
    pools: Annotated[
        tuple[str, ...], Flag("pool"), Meta(description="a pool that may exist (default: any); repeatable")
    ] = (),
    servers: Annotated[Literal[1, 3, 5], Meta(description="servers of the cluster")] = 1,
    hosts: Hosts = "127.0.0.1",
    store: Annotated[str, Meta(description="folder of JetStream's storage")] = "nats-data",
    tls_cert: Annotated[str, Meta(description="the servers' certificate, PEM")] = "",
    tls_key: Annotated[str, Meta(description="private key of the certificate, PEM")] = "",
    tls_ca: Annotated[str, Meta(description="CA certificates, PEM")] = "",
    tls_verify: Annotated[bool, Meta(description="require client certificates")] = False,
    kubernetes: Annotated[
        str,
        Meta(
            description="print the manifest of a Secret of this name, with keys and permissions for the Helm chart, in place of a "
            "nats.conf; with --out as secret.yaml"
        ),
    ] = "",
    sites: Sites = (),
    leaf_port: LeafPort = 7422,
    hub: Hub = "",
) -> int:
    """Write a nats.conf that grants each kind of process only the permissions it needs.

    Without --out the configuration is printed, and the keys on standard error. With --out what is in the folder already is kept.
    """
    from headwater.ops.nats import config

    plan = config.Wanted(
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
        sites,
        leaf_port,
        tuple(address.strip() for address in hub.split(",") if address.strip()),
    )
    return _deliver(plan, out, kubernetes)


def _deliver(plan: "Wanted", out: str, kubernetes: str) -> int:
    """Write or print the files that are wanted, or with `kubernetes` those of a Secret of this name."""
    from headwater.ops.nats import config

    if out:
        folder = Path(out)
        written = (
            config.write_kubernetes(plan, kubernetes, folder) if kubernetes else config.write(plan, folder)
        )
        for name in written:
            print(f"{out}/{name}")
        return 0
    if kubernetes:
        print(config.kubernetes_secret(plan, kubernetes, {})[config.MANIFEST_FILE], end="")
        return 0
    files = config.make(plan, {})
    for name, text in files.configurations.items():
        if len(files.configurations) > 1:
            print(f"# ---- {name}")
        print(text, end="")
    # Keys are stored only if asked for, and the configuration is useless without them.
    for name, text in files.secrets.items():
        if not name.endswith(".env"):
            print(f"{name}: {text.strip()}", file=sys.stderr)
    return 0


@command
def monitoring(
    *,
    out: Annotated[str, Meta(description="folder for the files; made if it is missing")],
    data_dir: Annotated[str, Key("data_dir")],
    scrape_s: Annotated[
        Annotated[int, Meta(ge=1)], Meta(description="seconds between two scrapes of each process")
    ] = 5,
    targets: Annotated[
        tuple[str, ...],
        Flag("target"),
        Meta(
            description="HOST:PORT of the metrics of a process that `up` did not start, here or elsewhere; repeatable"
        ),
    ] = (),
) -> int:
    """Write Grafana's boards (boards/*.json), alert rules (alerts.yaml) and a configuration of Prometheus (prometheus.yml).

    Then: prometheus --config.file FOLDER/prometheus.yml. The fleet of --data-dir may start later.
    """
    from headwater.ops.monitoring.files import write_files

    for path in write_files(Path(out), Path(data_dir), scrape_s, targets):
        print(path)
    return 0


@command
def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Meta(description="the shell")], /) -> int:
    """Print a completion script for a shell.

    bash: source <(headwater completion bash). zsh: save it as _headwater in a folder of $fpath. fish: save it as
    ~/.config/fish/completions/headwater.fish.
    """
    from headwater.ops.commands.application import application

    print(application().generate_completion(shell=shell))
    return 0


@command
def warm() -> int:
    """Precompile kernels and imports, so that the first start is as fast as later ones."""
    from headwater.ops.start.actor import compile_kernels
    from headwater.ops.start.children import child_environment, headwater_command

    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        return subprocess.run(headwater_command("warm"), env=child_environment(), check=False).returncode
    began = time.monotonic()
    compile_kernels()
    # Importing writes the bytecode of the modules that a fleet's processes use.
    from headwater.ops.launch import up  # noqa: F401 (for the bytecode)
    from headwater.ops.start import (  # noqa: F401 (for the bytecode)
        edge,
        engine,
        router,
    )

    print(f"compiled the kernels in {time.monotonic() - began:.1f} s")
    return 0


@command(
    defaults={"log.level": "error"},
    notes="Exit status: 0 if there is nothing but notes, 1 if there are findings, 2 if the server is out of reach or an argument is wrong.",
)
async def doctor(
    settings: StreamOperator,
    *,
    monitor: Annotated[
        str,
        Meta(
            description="URL of the NATS server's monitoring port, such as http://127.0.0.1:8222, for what only that tells "
            "(default: that of the fleet of --data-dir)"
        ),
    ] = "",
    engine_log: Annotated[
        str, Meta(description="file with the log of an engine that did not start, to find the cause in")
    ] = "",
    data_dir: Annotated[str, Key("data_dir")],
    cache_dir: Annotated[str, Key("cache_dir")],
    host: Annotated[str, Key("http.host")],
    port: Annotated[int, Key("http.port")],
    as_json: Json = False,
) -> int:
    """Find what is wrong with a fleet, its server and this machine, and the remedy of each. Nothing is changed."""
    from headwater.ops.debug import doctor as debug_doctor
    from headwater.ops.debug.doctor_collect import Asked
    from headwater.ops.debug.doctor_facts import Place, WantedPort

    nats = settings.nats
    ports = [WantedPort("--port", host, port)] if port else []
    if not nats.url and nats.port:
        ports.insert(0, WantedPort("--nats-port", "127.0.0.1", nats.port))
    place = Place(Path(data_dir), cache_dir, tuple(ports))
    options = Asked(nats, settings.streams, place, monitor, engine_log)
    return await debug_doctor.doctor(options, as_json=as_json)
