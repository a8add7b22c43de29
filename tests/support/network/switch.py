"""An Ethernet switch as a process: it delays, drops and blocks what goes from host to host.

The kernel's own `netem` is a module that many machines lack. This needs only TAP devices: one in the network of each host and one, "the lab",
in the network of the test, whose frames are neither delayed nor dropped. TCP above it retransmits as over any network that loses frames.

Frames of one pair of hosts keep their order. Each line on standard input is a `Rules`; each is answered by a line once it holds. The switch ends
with its standard input, and with it all its devices.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

import msgspec

from tests.support.network.namespaces import network_of

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_BYTES_MAX = 1 << 16
FRAMES_AT_ONCE = 64
HEADER = struct.Struct("6s6s")
NETWORKS = 200
"""Networks that may exist at once, each with a lab's device of its own name."""


class Rules(msgspec.Struct, frozen=True):
    """What happens to frames between hosts. `delay_s` is for one direction. `cut` are pairs of hosts that do not reach each other."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    cut: tuple[tuple[int, int], ...] = ()


class Ready(msgspec.Struct, frozen=True):
    """The first line that a switch prints: the number of its network, and the name of the lab's device."""

    network: int
    device: str


def _tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _lab() -> tuple[int, Ready]:
    """The lab's device, under the first name that no other switch has."""
    for network in range(NETWORKS):
        name = f"hwlab{network}"
        try:
            return _tap(name), Ready(network, name)
        except OSError:
            continue
    raise SystemExit("every name of a lab's device is taken, or this machine permits no TAP devices")


class Switch:
    """Ports are numbered as the hosts are, the lab's is the last."""

    def __init__(self, ports: list[int], seed: int) -> None:
        self._ports = ports
        self._lab = len(ports) - 1
        self._dice = random.Random(seed)
        self._learned: dict[bytes, int] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._last: dict[tuple[int, int], float] = {}
        self._frames = 0
        self._rules = Rules()
        self._blocked: frozenset[tuple[int, int]] = frozenset()

    def follow(self, rules: Rules) -> None:
        """Frames that arrive from now on meet these rules; those on their way are dropped where they are blocked."""
        self._rules = rules
        self._blocked = frozenset((*rules.cut, *((there, here) for here, there in rules.cut)))

    def run(self) -> None:
        """Switch until standard input is closed."""
        poll = select.epoll()
        numbers = {descriptor: number for number, descriptor in enumerate(self._ports)}
        for descriptor in (*self._ports, sys.stdin.fileno()):
            poll.register(descriptor, select.EPOLLIN)
        while True:
            for descriptor, _ in poll.poll(self._pause_s()):
                if descriptor in numbers:
                    self._take(numbers[descriptor])
                elif not self._command():
                    return
            self._deliver()

    def _command(self) -> bool:
        line = sys.stdin.buffer.readline()
        if line:
            self.follow(msgspec.json.decode(line, type=Rules))
            print("followed", flush=True)
        return bool(line)

    def _pause_s(self) -> float:
        return max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else -1.0

    def _take(self, port: int) -> None:
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame = os.read(self._ports[port], FRAME_BYTES_MAX)
            except BlockingIOError:
                return
            to, sender = HEADER.unpack_from(frame)
            self._learned[sender] = port
            known = self._learned.get(to)
            # To all: a broadcast, or a host that has not spoken yet.
            targets = [known] if known is not None else range(len(self._ports))
            for target in targets:
                if target != port:
                    self._send(port, target, frame)

    def _send(self, port: int, target: int, frame: bytes) -> None:
        if self._lab in (port, target):
            self._write(target, frame)
            return
        rules = self._rules
        if (port, target) in self._blocked or (rules.loss and self._dice.random() < rules.loss):
            return
        delay_s = rules.delay_s + (self._dice.uniform(0, rules.jitter_s) if rules.jitter_s else 0.0)
        due = max(time.monotonic() + delay_s, self._last.get((port, target), 0.0))
        self._last[port, target] = due
        self._frames += 1
        # The pair is one number, so that a frame's bytes are never compared.
        pair = port * len(self._ports) + target
        heapq.heappush(self._waiting, (due, self._frames, pair, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, pair, frame = heapq.heappop(self._waiting)
            port, target = divmod(pair, len(self._ports))
            if (port, target) not in self._blocked:
                self._write(target, frame)

    def _write(self, target: int, frame: bytes) -> None:
        try:
            os.write(self._ports[target], frame)
        except OSError:
            return  # a full queue, or a device that is down: as lost as on a wire


def main(seed: int, hosts: list[int]) -> None:
    """Switch between the networks of these processes."""
    lab, ready = _lab()
    ports = []
    for pid in hosts:
        with network_of(pid):
            ports.append(_tap("eth0"))
    print(msgspec.json.encode(ready).decode(), flush=True)
    Switch([*ports, lab], seed).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(pid) for pid in sys.argv[2:]])
