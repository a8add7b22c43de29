"""Commands start in the surroundings of others as in our own: containers, service managers, odd users, closed streams, full of foreign variables."""

from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from headwater.ops.commands import COMMANDS
from headwater.ops.start.sockets import free_range
from tests.support.processes.commands import Ended
from tests.support.processes.fleet import FleetProcess, shared_fleet
from tests.support.processes.surroundings import (
    Line,
    Surrounding,
    another_user,
    has_namespaces,
    read_only,
    run,
)

pytestmark = [pytest.mark.processes]

in_module_loop = pytest.mark.asyncio(loop_scope="module")

TOKEN = "a-token-of-more-than-thirty-two-characters"
SERVICE = {
    # What Kubernetes sets for services named headwater and headwater-nats in the same namespace.
    "HEADWATER_SERVICE_HOST": "10.0.0.1",
    "HEADWATER_SERVICE_PORT": "8000",
    "HEADWATER_SERVICE_PORT_HTTP": "8000",
    "HEADWATER_PORT": "tcp://10.0.0.1:8000",
    "HEADWATER_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "HEADWATER_PORT_8000_TCP_PROTO": "tcp",
    "HEADWATER_PORT_8000_TCP_PORT": "8000",
    "HEADWATER_PORT_8000_TCP_ADDR": "10.0.0.1",
    "HEADWATER_NATS_SERVICE_HOST": "10.0.0.2",
    "HEADWATER_NATS_SERVICE_PORT": "4222",
    "HEADWATER_NATS_PORT": "tcp://10.0.0.2:4222",
    "HEADWATER_NATS_PORT_4222_TCP": "tcp://10.0.0.2:4222",
}
EMPTY = {
    f"HEADWATER_{name}": ""
    for name in ("HOST", "METRICS_HOST", "ADMIN_HOST", "PORT", "NATS", "CONFIG", "LOG_LEVEL", "WORKERS")
}
"""As a template writes variables for which no value was given."""

ASCII: dict[str | bytes, str | bytes | None] = {
    "LC_ALL": "POSIX",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": None,
    b"JUNK": b"\xff\xfe",
}

namespaces = pytest.mark.skipif(
    not has_namespaces(), reason="needs mounts of its own, and to become another user"
)

SURROUNDINGS = {
    "as usual": lambda folder: Surrounding(),
    "no home": lambda folder: Surrounding({"HOME": None}),
    "a user without a name": lambda folder: Surrounding({"HOME": "/"}, another_user()),
    "a read-only root": lambda folder: Surrounding({"HOME": "/nonexistent"}, read_only(folder)),
    "without standard input": lambda folder: Surrounding(closed=(0,)),
    "without standard output": lambda folder: Surrounding(closed=(1,)),
    "without standard streams": lambda folder: Surrounding(closed=(0, 1, 2)),
    "not UTF-8": lambda folder: Surrounding(ASCII),
    "in a deleted folder": lambda folder: Surrounding(deleted=True),
    "no temporary folder": lambda folder: Surrounding({"TMPDIR": "/nonexistent"}),
    "256 descriptors": lambda folder: Surrounding(descriptors=256),
    "variables of a service": lambda folder: Surrounding(SERVICE),
    "empty variables": lambda folder: Surrounding(EMPTY),
}
ROOTS = ("a user without a name", "a read-only root")
"""Those that not every user may make."""


SHORT = "a read-only root"
SHORT_COMMANDS = frozenset(("up", "router", "engine", "keys", "config", "warm", "explain", "capture"))
"""What every run tries: one command of each kind. All commands in all surroundings are in `make soak`, where each takes some ten seconds."""

SERVERS_SHORT = "without standard streams"
"""The one that every run tries with the commands that serve, which others start."""


class Start(NamedTuple):
    """How a command is started, and how it ends: its code, and a word of what it says."""

    words: tuple[str, ...]
    code: int = 0
    says: str = ""
    serves: str = ""
    """The flag of the port at which it serves until it is told to end."""


CLIENT = ("--nats", "NATS")
SIM = ("--engine", "sim", "--workers", "1")

STARTS: dict[str, list[Start]] = {
    "up": [Start((*SIM, "--nats-port", "0", "--data-dir", "FOLDER/up"), serves="--port")],
    "demo": [Start((*SIM, "--data-dir", "FOLDER/demo"), says="why each went where it went")],
    "edge": [Start((*CLIENT, "--port", "0"), serves="--metrics-port")],
    "router": [Start((*CLIENT, "--pool", "sim-b16"), serves="--metrics-port")],
    "engine": [Start(("sim", *CLIENT), code=143, serves="--metrics-port")],
    "console": [Start((*CLIENT,), serves="--console-port")],
    "admin": [Start((*CLIENT, "--admin-token-file", "TOKENS"), serves="--admin-port")],
    "launch": [Start(("FLEET", "--show"), says="nats-server on port")],
    "slurm": [Start(("render", "HOSTS"), says="#SBATCH --nodes=1")],
    "systemd": [Start(("render", "FLEET", "--out", "FOLDER/units"), says="headwater.target")],
    "compose": [Start(("render", "FLEET"), says="services:")],
    "kubernetes": [Start(("render", "FLEET"), says="modelArtifacts:")],
    "tracer": [
        Start(
            (*CLIENT, "--otlp", "http://127.0.0.1:9", "--data-dir", "FOLDER/tracer"), serves="--metrics-port"
        )
    ],
    "picker": [Start((*CLIENT, "--picker-port", "0"), serves="--metrics-port")],
    "shadow": [Start((*CLIENT, "--policy", "random"), serves="--metrics-port")],
    "ctl": [Start(("list", *CLIENT), says="worker-0")],
    "keys": [Start(("list", *CLIENT))],
    # Of the fleet it would find that others of these commands start and end processes.
    "doctor": [Start(("--nats", "nats://127.0.0.1:9"), code=2, says="nats-unreachable")],
    "monitoring": [Start(("--out", "FOLDER/monitoring"), says="alerts.yaml")],
    "switch": [Start(CLIENT, says="revision")],
    "rollback": [Start(CLIENT, code=2, says="there is no roll-out to roll back")],
    "backup": [Start(("--out", "FOLDER/copy", *CLIENT), says="pool log")],
    "restore": [Start(("/nonexistent",), code=2, says="no backup")],
    "streams": [Start(CLIENT, says="default")],
    "pools": [Start(CLIENT, says="sim-b16"), Start(("--watch", *CLIENT), serves="--metrics-port")],
    "nats-config": [
        Start((), says="jetstream"),
        Start(("--out", "FOLDER/keys", "--store", "FOLDER/store")),
        Start(("--kubernetes", "keys", "--out", "FOLDER/secret")),
    ],
    # A site's servers have that name as their domain, and are leaf nodes: this server has none.
    "mirror": [Start(("site-a", *CLIENT), code=2, says="site site-a does not answer")],
    "config": [Start(("show", "--config", "FILE"), says="sim-f"), Start(("reference",), says="http.port")],
    "completion": [Start(("bash",), says="complete")],
    "warm": [Start((), says="compiled")],
    "explain": [Start(("REQUEST", *CLIENT), says="least cost")],
    "trace": [Start(("REQUEST", *CLIENT), says="router router-0")],
    "log": [Start(CLIENT, says="Decision")],
    "tree": [Start(CLIENT)],
    "replay": [Start(("--verify", *CLIENT))],
    "snapshots": [Start(CLIENT)],
    "capture": [Start(("--around", "-1s", "-o", "FOLDER/made.hwc", *CLIENT), says="positions 1 to")],
    "open": [Start(("/nonexistent",), code=2, says="/nonexistent")],
    "tail": [Start(("--no-follow", *CLIENT), says="load.reported")],
    "top": [Start(("--once", *CLIENT), says="worker-0")],
    "diff": [Start(("start", "end", *CLIENT), says="worker-0")],
    "bisect": [Start(("--when", "workers.ready > 0", *CLIENT), says="fleet.joined")],
    "why-not": [Start(("REQUEST", "worker-0", *CLIENT), says="worker-0")],
    "stuck": [Start(CLIENT)],
    "export": [Start(("--perfetto", "-o", "FOLDER/trace.json", *CLIENT))],
    "engines": [Start((), says="sim")],
    "check-engine": [Start(("none",), code=2, says="none")],
    "models": [Start(("inspect", "/nonexistent"), code=2, says="/nonexistent")],
    "whatif": [Start(("log", *CLIENT))],
    "advise": [Start(("/nonexistent", "--model", "m", "--gpus", "1xH100"), code=2, says="/nonexistent")],
    "compare": [Start((), code=2)],
    "tune": [Start(("trace", "/nonexistent"), code=2, says="/nonexistent")],
    "sim": [Start(("--seed", "1", "--json"), says='"problems":[]')],
    "bench": [Start(("--help",), says="Measure")],
}


def test_the_table_has_every_command() -> None:
    """A new command is started in odd surroundings, too."""
    assert set(STARTS) == {name for _, commands in COMMANDS.values() for name in commands}


up = shared_fleet(*SIM)
"""A simulated fleet in our own surroundings, which the commands are about."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def request_id(up: FleetProcess) -> str:
    """A request that was answered."""
    body = {"model": "sim", "prompt": "Where does a river begin? " * 20, "max_tokens": 4}
    async with up.client() as client:
        answer = await client.post("/v1/completions", json=body)
    await up.until_indexed(25)
    return answer.headers["x-request-id"]


def _written(folder: Path) -> None:
    folder.chmod(0o777)
    (folder / "fleet.toml").write_bytes('# für alle\n[worker]\nserved_model_name = "sim-f"\n'.encode())
    (folder / "one.toml").write_bytes(
        '# für alle\n[pools.sim]\n[[pools.sim.workers]]\nengine = "sim"\n'.encode()
    )
    (folder / "hosts.toml").write_bytes(b'[hosts.a]\n[pools.sim]\n[[pools.sim.workers]]\nengine = "sim"\n')
    (folder / "tokens").write_text(f"operator {TOKEN}\n")


def _lines(up: FleetProcess, request: str, folder: Path) -> list[tuple[str, Start, Line]]:
    places = {
        "NATS": up.nats,
        "REQUEST": request,
        "FILE": str(folder / "fleet.toml"),
        "TOKENS": str(folder / "tokens"),
        "FLEET": str(folder / "one.toml"),
        "HOSTS": str(folder / "hosts.toml"),
    }
    made = []
    for name, starts in STARTS.items():
        for start in starts:
            words = [name, *(places.get(word, word.replace("FOLDER", str(folder))) for word in start.words)]
            port = free_range(1, "127.0.0.1") if start.serves else 0
            made.append((name, start, Line([*words, start.serves, str(port)] if port else words, port)))
    return made


@in_module_loop
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[namespaces] * (name in ROOTS)) for name in SURROUNDINGS]
)
@pytest.mark.soak
async def test_every_command_starts(up: FleetProcess, request_id: str, tmp_path: Path, name: str) -> None:
    """Each ends as it does in our own surroundings, with the same code and words, and without a traceback."""
    await _check_starts(up, request_id, tmp_path, name, set(STARTS))


@namespaces
@in_module_loop
@pytest.mark.timeout(240)
async def test_commands_of_each_kind_start(up: FleetProcess, request_id: str, tmp_path: Path) -> None:
    """The short form of `test_every_command_starts`."""
    await _check_starts(up, request_id, tmp_path, SHORT, SHORT_COMMANDS)


@in_module_loop
@pytest.mark.timeout(240)
async def test_every_command_that_serves_starts(up: FleetProcess, request_id: str, tmp_path: Path) -> None:
    """The same without standard streams, as service managers may start them."""
    serving = {name for name, starts in STARTS.items() if any(start.serves for start in starts)}
    await _check_starts(up, request_id, tmp_path, SERVERS_SHORT, serving)


async def _check_starts(
    up: FleetProcess, request_id: str, tmp_path: Path, name: str, commands: Set[str]
) -> None:
    _written(tmp_path)
    tmp_path.chmod(0o777)
    surrounding = SURROUNDINGS[name](tmp_path)
    lines = [one for one in _lines(up, request_id, tmp_path) if one[0] in commands]
    ends = await run(surrounding, [line for _, _, line in lines], tmp_path, within_s=200)
    wrong = [
        f"{' '.join(line.words)}: {reason}"
        for (_, start, line), end in zip(lines, ends, strict=True)
        if (reason := _difference(start, end, surrounding.closed))
    ]
    assert not wrong, "\n".join(wrong)


def _difference(start: Start, end: Ended, closed: tuple[int, ...]) -> str:
    """How an end differs from what was wanted; "" where it does not."""
    if end.code != start.code:
        return f"code {end.code} instead of {start.code}: {end.output[-800:]}"
    if "Traceback" in end.output:
        return end.output[-800:]
    said = not start.says or start.says in end.output or (2 if start.code else 1) in closed
    return "" if said else f"{start.says!r} is not in {end.output[-800:]!r}"


FILES: dict[str, bytes | None] = {"missing.toml": None, "binary.toml": b"\x00\xff\xfe", "secret.toml": b""}
READERS = ("up", "edge", "router", "engine", "streams", "config show")


@namespaces
@in_module_loop
async def test_a_configuration_file_that_cannot_be_used(tmp_path: Path) -> None:
    """Missing, not text, a folder, or not this user's to read: each command says so in one line that names it."""
    for name, content in FILES.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    (tmp_path / "secret.toml").chmod(0)
    (tmp_path / "folder.toml").mkdir()
    # Root without its right to read what is not its to read.
    secret = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all")
    lines = [
        Line([*command.split(), "--config", str(tmp_path / name)])
        for name in (*FILES, "folder.toml")
        for command in READERS
    ]
    ends = await run(Surrounding(prefix=secret), lines, tmp_path)
    for line, end in zip(lines, ends, strict=True):
        assert end.code == 2, (line.words, end.output[-800:])
        assert line.words[-1] in end.told()
