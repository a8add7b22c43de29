"""A fleet's file under a real sshd and a real Slurm, each host an address of this machine's loopback interface."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from headwater.ops.start.children import child_environment, headwater_command
from headwater.ops.start.sockets import free_port, free_range
from tests.support.network.ssh import NO_SSHD, running, sshd, until_logged, write_keys

pytestmark = [pytest.mark.soak, pytest.mark.timeout(240)]

HEADWATER = f"{sys.executable} -m headwater.ops.cli"

CHAT = {"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello!"}]}

NO_SLURM = shutil.which("slurmctld", path="/usr/sbin:/usr/bin") is None or os.getuid() != 0


def fleet(
    folder: Path, addresses: list[str], port: int, edge: int, ssh: Callable[[str], str] | None = None
) -> str:
    """A fleet with a host for each address, an edge on the first, and a worker on each of the others."""
    names = [chr(ord("a") + number) for number in range(len(addresses))]
    lines = [f'data_dir = "{folder}/data"', "settings.drain_timeout = 5", "console.count = 0"]
    lines += [
        f'nats = {{ hosts = {names if len(names) > 2 else names[:1]}, port = {port}, keys_dir = "{folder}/keys" }}'
    ]
    lines += ["[edges]", 'hosts = ["a"]', f"settings.http.port = {edge}"]
    for name, address in zip(names, addresses, strict=True):
        lines += [f"[hosts.{name}]", f'address = "{address}"', f'command = "{HEADWATER}"']
        lines += [f'ssh = "{ssh(name)}"'] if ssh is not None else []
    return "\n".join(
        [*lines, "[pools.sim]", "[[pools.sim.workers]]", 'engine = "sim"', f"hosts = {names[1:]}"]
    )


async def until_answers(port: int, workers: int, within_s: float = 90) -> None:
    """Wait until an edge answers a chat, and until so many different workers are listed."""
    async with (
        asyncio.timeout(within_s),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client,
    ):
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = await client.get("/health")
                if answer.status_code == 200 and sum(answer.json().get("workers", {}).values()) >= workers:
                    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
                    return
            await asyncio.sleep(0.2)


@pytest.fixture
def ssh_config(tmp_path: Path) -> Iterator[Path]:
    """A configuration of ssh that reaches an sshd of the test's own under any name."""
    with sshd(tmp_path) as config:
        yield config


@pytest.mark.skipif(NO_SSHD, reason="sshd is not installed")
async def test_three_hosts_behind_ssh_with_a_cluster_of_their_own(tmp_path: Path, ssh_config: Path) -> None:
    addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    port, edge = free_range(1, "127.0.0.1"), free_port(0)
    write_keys(tmp_path, addresses, port)
    path = tmp_path / "fleet.toml"
    path.write_text(fleet(tmp_path, addresses, port, edge, lambda name: f"-F {ssh_config} {name}"))
    log = tmp_path / "launch.log"
    async with running(tmp_path, path) as process:
        await until_answers(edge, 2)
        await until_logged(log, "the fleet is ready on 3 hosts: a, b, c", within_s=60)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0, log.read_text()
    text = log.read_text()
    assert "Traceback" not in text
    # The servers ended last: no process lost its quorum while it finished.
    assert "persistence_stalled" not in text
    # Nothing is left behind on any host.
    assert not still_open("127.0.0.1", edge)
    assert not any(still_open(address, port) for address in addresses)


@pytest.mark.skipif(NO_SSHD, reason="sshd is not installed")
async def test_hosts_stop_when_the_terminal_that_started_them_is_gone(
    tmp_path: Path, ssh_config: Path
) -> None:
    """SIGKILL of the command closes its connections, and each host's input ends."""
    addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    port, edge = free_range(1, "127.0.0.1"), free_port(0)
    write_keys(tmp_path, addresses, port)
    path = tmp_path / "fleet.toml"
    path.write_text(fleet(tmp_path, addresses, port, edge, lambda name: f"-F {ssh_config} {name}"))
    async with running(tmp_path, path) as process:
        await until_answers(edge, 2)
        process.kill()
        async with asyncio.timeout(60):
            while any(still_open(address, port) for address in addresses):
                await asyncio.sleep(0.2)


def still_open(host: str, port: int) -> bool:
    """Does a port accept a connection?"""
    with socket.socket() as client:
        return client.connect_ex((host, port)) == 0


SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/ctl
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/ctl.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctl.log
SlurmdLogFile={folder}/%n.log
KillWait=20
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.2 Port={second} CPUs=2 State=UNKNOWN
PartitionName=p Nodes=n0,n1 Default=YES State=UP MaxTime=10
"""


@pytest.fixture
async def slurm(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """The environment of a cluster of two nodes on this machine."""
    first = free_range(3, "127.0.0.1")
    (tmp_path / "ctl").mkdir()
    config = tmp_path / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    config.write_text(SLURM.format(host=host, folder=tmp_path, port=first, first=first + 1, second=first + 2))
    environ = child_environment() | {"SLURM_CONF": str(config)}
    daemons = [
        ("slurmctld", "-D", "-c"),
        ("slurmd", "-D", "-c", "-N", "n0"),
        ("slurmd", "-D", "-c", "-N", "n1"),
    ]
    with (tmp_path / "daemons.log").open("wb") as log:
        started = [
            await asyncio.create_subprocess_exec(
                f"/usr/sbin/{one[0]}", *one[1:], env=environ, stdout=log, stderr=log
            )
            for one in daemons
        ]
    try:
        async with asyncio.timeout(60):
            while told("sinfo", "-h", "-t", "idle", "-o", "%D", environ=environ) != "2":
                await asyncio.sleep(0.3)
        yield environ
    finally:
        told("scancel", "-u", "root", environ=environ)
        for daemon in reversed(started):
            daemon.terminate()
            await daemon.wait()


def told(*command: str, environ: dict[str, str], folder: Path | None = None) -> str:
    """What a command prints."""
    done = subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout.strip() or done.stderr.strip()


@pytest.mark.skipif(NO_SLURM, reason="Slurm is not installed, or its daemons may not be started")
async def test_a_job_starts_a_dead_host_again_and_drains_at_its_end(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    port, edge = free_port(0), free_port(0)
    write_keys(tmp_path, ["127.0.0.1"], port)
    (tmp_path / "fleet.toml").write_text(fleet(tmp_path, ["10.0.0.1", "10.0.0.2"], port, edge))
    render = headwater_command("slurm", "render", str(tmp_path / "fleet.toml"), "--time", "5", "--gpus", "0")
    (tmp_path / "job.sh").write_text(told(*render, environ=slurm) + "\n")
    assert told("sbatch", "--test-only", "job.sh", environ=slurm, folder=tmp_path).startswith("sbatch: Job")
    job = told("sbatch", "--parsable", "job.sh", environ=slurm, folder=tmp_path)
    assert job.isdigit(), job
    output = tmp_path / f"slurm-{job}.out"
    await until_answers(edge, 1)
    (part,) = parts_of(f"headwater-{job}/fleet.toml --host b")
    os.kill(part, signal.SIGKILL)
    async with asyncio.timeout(60):
        while "b on n1 ended with exit code 137, started again" not in output.read_text():
            await asyncio.sleep(0.2)
        while not parts_of(f"headwater-{job}/fleet.toml --host b"):
            await asyncio.sleep(0.2)
    await until_answers(edge, 1)
    told("scancel", "--signal=TERM", "--batch", job, environ=slurm)
    async with asyncio.timeout(60):
        while "JobState=COMPLETED" not in told("scontrol", "show", "job", job, environ=slurm):
            await asyncio.sleep(0.3)
    assert "the job ends: each host finishes its requests" in output.read_text()
    assert "draining" in (tmp_path / f"headwater-{job}" / "b.log").read_text()
    assert not parts_of(f"headwater-{job}/fleet.toml")
    assert not still_open("127.0.0.1", edge)


def parts_of(text: str) -> list[int]:
    """Processes of Python whose command line contains a text, the topmost ones of each host: they have it, and their parents do not."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if text in words and words.startswith(sys.executable):
                    found.append(int(entry.name))
    return found[:1]
