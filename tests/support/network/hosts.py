"""Hosts on one machine: each has its own addresses, host name, /dev/shm and loopback, and reaches the others over a network that can be hurt.

A host is a set of Linux namespaces that lives as long as one process. No namespace and no device has a name that outlives the test: the kernel
removes all of them when the processes end, and it ends these when the test does, in whatever way.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import IO, Final

import msgspec
import pytest

from headwater.ops.start.signals import die_with_parent
from tests.support.network.switch import Ready, Rules
from tests.support.processes import zygote

LAB: Final = 254
"""Last number of the test's own address, from which every host is reached whatever happens between them."""

MTU: Final = 9000
"""Jumbo frames: the switch has fewer to look at."""

READY_S: Final = 10.0

ENTER: Final = """
import sys
from tests.support.network.namespaces import enter
enter(int(sys.argv[1]))
from headwater.ops import cli
sys.exit(cli.main(sys.argv[2:]))
"""

NAMESPACES: Final = ("--net", "--uts", "--ipc", "--mount")


@cache
def refusal() -> str:
    """Why this machine permits no hosts; empty where it does."""
    missing = [name for name in ("ip", "unshare", "nsenter", "mount") if shutil.which(name) is None]
    if missing:
        return f"no hosts here: {', '.join(missing)} is missing (packages iproute2, util-linux and mount)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no hosts here: /dev/net/tun cannot be opened, so there are no TAP devices"
    tried = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, text=True)
    return f"no hosts here: {tried.stderr.strip()}" if tried.returncode else ""


needs_hosts = pytest.mark.skipif(bool(refusal()), reason=refusal() or "hosts are permitted")
"""Mark of tests with hosts. The reason of a skip is in the summary of the run."""


class Host:
    """One host: `name` resolves to `address` on all of them."""

    def __init__(self, name: str, number: int, holder: "subprocess.Popen[bytes]") -> None:
        self.name = name
        self.number = number
        self.address = ""
        self._holder = holder

    @property
    def pid(self) -> int:
        """Id of the process that holds the namespaces."""
        return self._holder.pid

    def command(self, *words: str) -> list[str]:
        """A command line that runs another one on this host, as the same process."""
        names = [f"--{name}=/proc/{self.pid}/ns/{kind}" for name, kind in _NSENTER]
        return ["nsenter", *names, f"--wd={Path.cwd()}", "--", *words]

    def run(self, *words: str) -> str:
        """Run a command here to its end; its output. Raises `CalledProcessError`."""
        return subprocess.run(self.command(*words), capture_output=True, text=True, check=True).stdout

    def popen(self, *words: str, output: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Start a program here that ends with this process at the latest."""
        return subprocess.Popen(
            self.command(*words), stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )

    async def start(
        self,
        *arguments: str,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        environ: Mapping[str, str] | None = None,
        vllm: bool = False,
        sglang: bool = False,
    ) -> zygote.Process:
        """Start `headwater ARGUMENTS` here: see `zygote.start`."""
        return await zygote.start(
            *("-c", ENTER, str(self.pid), *arguments),
            stdout=stdout,
            stderr=stderr,
            environ=environ,
            vllm=vllm,
            sglang=sglang,
        )

    async def finish(self, *arguments: str, within_s: float = 120) -> tuple[int, str]:
        """Run `headwater ARGUMENTS` here to its end; its exit code and what it printed."""
        process = await self.start(*arguments, stdout=zygote.PIPE, stderr=zygote.STDOUT)
        try:
            async with asyncio.timeout(within_s):
                output, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            raise
        return process.returncode or 0, output.decode()


_NSENTER = (("net", "net"), ("uts", "uts"), ("ipc", "ipc"), ("mount", "mnt"))


class Network:
    """Hosts and the switch between them. Made by `network`."""

    def __init__(self, hosts: list[Host], switch: "subprocess.Popen[bytes]", prefix: str) -> None:
        self.hosts = hosts
        self.prefix = prefix
        self._switch = switch
        self._rules = Rules()

    def shape(self, *, round_trip_s: float = 0.0, jitter_s: float = 0.0, loss: float = 0.0) -> None:
        """From now on a round trip between hosts takes this long, with at most `jitter_s` more each way, and this share of frames is lost."""
        self._follow(
            msgspec.structs.replace(self._rules, delay_s=round_trip_s / 2, jitter_s=jitter_s, loss=loss)
        )

    def isolate(self, *hosts: Host) -> None:
        """Cut these hosts off all others; they reach each other."""
        others = [one for one in self.hosts if one not in hosts]
        self.cut((here, there) for here in hosts for there in others)

    def cut(self, pairs: Iterable[tuple[Host, Host]]) -> None:
        """Cut exactly these pairs of hosts."""
        cut = tuple((here.number, there.number) for here, there in pairs)
        self._follow(msgspec.structs.replace(self._rules, cut=cut))

    def heal(self) -> None:
        """All hosts reach each other again."""
        self.cut(())

    def pairs(self) -> list[tuple[Host, Host]]:
        """All pairs of hosts."""
        return list(combinations(self.hosts, 2))

    def _follow(self, rules: Rules) -> None:
        self._rules = rules
        assert self._switch.stdin is not None
        self._switch.stdin.write(msgspec.json.encode(rules) + b"\n")
        self._switch.stdin.flush()
        _line(self._switch)


def _line(switch: "subprocess.Popen[bytes]") -> bytes:
    assert switch.stdout is not None
    line = switch.stdout.readline()
    assert line, f"the switch ended with {switch.wait()}"
    return line


@contextmanager
def network(folder: Path, *names: str, seed: int = 0) -> Iterator[Network]:
    """Hosts of these names. Use it on the main thread: the kernel ends the hosts with the thread that started them."""
    holders: list[subprocess.Popen[bytes]] = []
    switch: subprocess.Popen[bytes] | None = None
    try:
        for _ in names:
            holders.append(
                subprocess.Popen(
                    ["unshare", *NAMESPACES, "sleep", "infinity"],
                    stdin=subprocess.DEVNULL,
                    preexec_fn=die_with_parent,
                )
            )
        hosts = [Host(name, number, holders[number]) for number, name in enumerate(names)]
        for host in hosts:
            _until_apart(host.pid)
        switch = subprocess.Popen(
            [
                sys.executable,
                *("-m", "tests.support.network.switch", str(seed)),
                *(str(host.pid) for host in hosts),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        ready = msgspec.json.decode(_line(switch), type=Ready)
        # Reserved for benchmarks of networks (RFC 2544): no real one has these addresses.
        prefix = f"198.18.{ready.network}"
        _configure(hosts, ready.device, prefix, folder)
        yield Network(hosts, switch, prefix)
    finally:
        for process in (switch, *holders):
            if process is not None:
                process.kill()
                process.wait()
        if switch is not None:
            for end in (switch.stdin, switch.stdout):
                assert end is not None
                end.close()


def _until_apart(pid: int) -> None:
    """Return once a process has its own namespaces, and runs what keeps them."""
    own = Path("/proc/self/ns/mnt").readlink()
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if Path(f"/proc/{pid}/ns/mnt").readlink() != own and _name(pid) == b"sleep\0":
            return
        time.sleep(0.005)
    raise TimeoutError("a host's namespaces were not made")


def _name(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()[:6]


def _configure(hosts: list[Host], device: str, prefix: str, folder: Path) -> None:
    table = folder / "hosts"
    for host in hosts:
        host.address = f"{prefix}.{host.number + 1}"
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
    table.write_text("\n".join(lines) + "\n")
    for host in hosts:
        script = (
            f"hostname {host.name}",
            "mount -t tmpfs headwater-test /dev/shm",
            f"mount --bind {table} /etc/hosts",
            "ip link set lo up",
            # The switch sees no announcements of addresses that nobody uses.
            "sysctl -qw net.ipv6.conf.eth0.disable_ipv6=1 || true",
            f"ip link set eth0 mtu {MTU} up",
            f"ip address add {host.address}/24 dev eth0",
            # To the test's address, which passes nothing on: programs find their own address by the way that they would take.
            f"ip route add default via {prefix}.{LAB}",
        )
        host.run("sh", "-ec", "\n".join(script))
    for words in (
        ("link", "set", device, "mtu", str(MTU), "up"),
        ("address", "add", f"{prefix}.{LAB}/24", "dev", device),
    ):
        subprocess.run(["ip", *words], check=True)
