"""Facts of this machine: disks, ports and who listens on them, key files, and the fleet that `headwater up` runs from a data folder."""

import os
import re
import socket
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from headwater.ops.config.nats import NatsSettings
from headwater.ops.config.setting import cache_folder
from headwater.ops.diagnosis.disk import free_bytes
from headwater.ops.doctor.facts import Listener, LocalFleet, MachineFacts, WantedPort
from headwater.schemas.addresses import is_loopback
from headwater.schemas.tables import Lease

LISTENING: Final = "0A"
"""A socket's state in /proc/net/tcp."""

OTHERS: Final = 0o077
"""Permissions of a file's group and of everyone."""


class Place(NamedTuple):
    """Where a fleet on this machine would be: its folders and the ports that it would listen on."""

    data_dir: Path
    cache_dir: str
    ports: tuple[WantedPort, ...]


def machine_facts(nats: NatsSettings, place: Place, leases: Sequence[Lease]) -> MachineFacts:
    """Everything about this machine. `leases` are those of the namespace, to know our own processes."""
    host = socket.gethostname()
    folders = [place.data_dir]
    if cache := cache_folder(place.cache_dir):
        folders.append(cache)
    listeners = read_listeners()
    sockets = []
    for lease in leases:
        if lease.kind == "worker" and lease.host == host and lease.pid:
            family = {lease.pid, *descendants(lease.pid)}
            sockets += [
                (lease.name, one)
                for one in listeners or ()
                if one.pid in family and not is_loopback(one.host)
            ]
    return MachineFacts(
        host,
        tuple(dict.fromkeys((str(folder), free_bytes(folder)) for folder in folders)),
        listeners,
        tuple(sockets),
        place.ports,
        local_fleet(place.data_dir),
        tuple(open_key_files(nats)),
    )


def local_fleet(folder: Path) -> LocalFleet | None:
    """The fleet that runs from a data folder; None where none does, or where it has no server of its own."""
    try:
        holder = re.search(r"with pid (\d+)", (folder / "lock").read_text())
        config = msgspec.json.decode((folder / "nats" / "nats.conf").read_bytes(), type=dict[str, object])
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError):
        return None
    if holder is None or not Path(f"/proc/{holder[1]}").exists():
        return None
    ports = [str(config.get(key, "")).rpartition(":")[2] for key in ("listen", "http")]
    if not ports[0].isdecimal():
        return None
    return LocalFleet(
        str(folder), int(holder[1]), int(ports[0]), int(ports[1]) if ports[1].isdecimal() else 0
    )


def open_key_files(nats: NatsSettings) -> Iterator[str]:
    """Files of our keys that others of this machine may read."""
    files = [Path(one) for one in (nats.nkey_file, nats.creds_file, nats.tls_key) if one]
    if nats.keys_dir:
        files += sorted(Path(nats.keys_dir).glob("*.nk"))
    for path in files:
        try:
            if path.stat().st_mode & OTHERS:
                yield str(path)
        except OSError:
            continue


def read_listeners() -> tuple[Listener, ...] | None:
    """The listening TCP sockets of this machine, or of this container; None on systems without /proc."""
    found: dict[str, tuple[str, int]] = {}
    seen = False
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        seen = True
        for line in lines:
            fields = line.split()
            if fields[3] == LISTENING:
                address, port = fields[1].split(":")
                found[fields[9]] = (_address(address), int(port, 16))
    if not seen:
        return None
    owners = _owners(set(found))
    return tuple(
        Listener(host, port, owners.get(inode, 0), _command(owners.get(inode, 0)))
        for inode, (host, port) in found.items()
    )


def _address(text: str) -> str:
    """An address as /proc/net spells it: words of four bytes, each in this machine's order."""
    data = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    if len(data) == 4:
        return str(IPv4Address(data))
    address = IPv6Address(data)
    return str(address.ipv4_mapped or address)


def _owners(inodes: set[str]) -> dict[str, int]:
    """The process that has each socket; those of other users are not visible."""
    owners: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            for handle in (entry / "fd").iterdir():
                target = os.readlink(handle)
                if target.startswith("socket:[") and target[8:-1] in inodes:
                    owners.setdefault(target[8:-1], int(entry.name))
        except OSError:
            continue
    return owners


def _command(pid: int) -> str:
    if not pid:
        return ""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return " ".join(word for word in words if word)[:80]


def descendants(pid: int) -> set[int]:
    """Ids of all processes below one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    found: set[int] = set()
    while more := {one for one, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found
