"""NIXL alone: one process reads another's memory in pieces of several sizes. The upper bound for a hand-off.

The pieces are in random order on both sides, like blocks in a used cache: NIXL joins adjacent pieces into one descriptor,
from which only a new cache would profit.
"""

import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

POLL_LIMIT_S = 60.0
SEED = 7


class CopyPlan(NamedTuple):
    """A transfer: total bytes, sizes of one piece, NIXL thread counts, READ or WRITE, repetitions."""

    size: int
    pieces: tuple[int, ...]
    threads: tuple[int, ...]
    operations: tuple[str, ...]
    repeats: int = 3


class Moved(NamedTuple):
    """One measurement: the fastest of the repeats in seconds, its posting, and whether the bytes arrived."""

    operation: str
    piece: int
    threads: int
    seconds: float
    post_s: float
    size: int
    right: bool


def target(pipe: Connection, device: str, size: int) -> None:
    """Body of the process whose memory is read: sends (metadata, address, device number), then waits for None."""
    from nixl._api import nixl_agent, nixl_agent_config

    memory = _pattern(device, size, SEED)
    agent = nixl_agent("target", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.data_ptr(), size, 0, "")], _kind(device))
    pipe.send((agent.get_agent_metadata(), memory.data_ptr()))
    pipe.recv()


def reader(pipe: Connection, device: str, plan: CopyPlan) -> None:
    """Body of the process that reads: receives the target's (metadata, address), sends a list of `Moved`."""
    from nixl._api import nixl_agent, nixl_agent_config

    metadata, address = pipe.recv()
    memory = _pattern(device, plan.size, SEED + 1)
    expected = _pattern(device, plan.size, SEED)
    done: list[Moved] = []
    for threads in plan.threads:
        config = nixl_agent_config(num_threads=threads, capture_telemetry=True)
        agent = nixl_agent(f"reader-{threads}", config)
        registered = agent.register_memory([(memory.data_ptr(), plan.size, 0, "")], _kind(device))
        name = agent.add_remote_agent(metadata)
        for piece in plan.pieces:
            pieces = _Pieces(agent, name, memory, address, device, piece)
            for operation in plan.operations:
                seconds, post_s, right = _measure(pieces, memory, expected, operation, plan.repeats)
                size = pieces.count * piece
                done.append(Moved(operation, piece, threads, seconds, post_s, size, right))
        agent.remove_remote_agent(name)
        agent.deregister_memory(registered)
    pipe.send(done)
    pipe.recv()


def copy(pipe: Connection, size: int) -> None:
    """Body of a process that sees two GPUs: sends the seconds of CUDA's own copy of `size` bytes between them."""
    import torch

    source = torch.empty(size, dtype=torch.uint8, device="cuda:1").random_()
    sink = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        began = time.perf_counter()
        sink.copy_(source, non_blocking=True)
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        best = min(best, time.perf_counter() - began)
    pipe.send(best)
    pipe.recv()


class _Pieces:
    """Pieces of one size of our memory and of the target's, paired at random."""

    def __init__(self, agent: Any, name: str, memory: Any, address: int, device: str, piece: int) -> None:
        import torch

        self.count = len(memory) // piece
        self._agent, self._name, self._device = agent, name, device
        mix = torch.Generator().manual_seed(SEED)
        here, there = (torch.randperm(self.count, generator=mix) for _ in range(2))
        self._here, self._there = here.to(memory.device), there.to(memory.device)
        self._late_here, self._late_there = self._here.flip(0), self._there.flip(0)
        self._rows = memory[: self.count * piece].view(self.count, piece)
        kind, base = _kind(device), memory.data_ptr()
        self._local = agent.get_xfer_descs([(base + i * piece, piece, 0) for i in here.tolist()], kind)
        self._remote = agent.get_xfer_descs([(address + i * piece, piece, 0) for i in there.tolist()], kind)

    def move(self, operation: str) -> tuple[float, float]:
        """Total seconds, and seconds of posting. Raises RuntimeError."""
        _settle(self._device)
        handle = self._agent.initialize_xfer(operation, self._local, self._remote, self._name, b"done")
        began = time.perf_counter()
        self._agent.transfer(handle)
        post_s = time.perf_counter() - began
        while (state := self._agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR" or time.perf_counter() - began > POLL_LIMIT_S:
                raise RuntimeError(f"{operation} of {self.count} pieces: {state}")
        seconds = time.perf_counter() - began
        self._agent.release_xfer_handle(handle)
        return seconds, post_s

    def put(self, content: Any) -> None:
        """Write `content`, which is in the target's order, to our pieces."""
        self._rows[self._here] = content[: self._rows.numel()].view_as(self._rows)[self._there]

    def holds(self, content: Any) -> bool:
        """Are our pieces equal to `content`? Checked at once, the last posted first, so that bytes which arrive after
        NIXL reported the end of the transfer are detected.
        """
        import torch

        found = self._rows[self._late_here]
        wanted = content[: self._rows.numel()].view_as(self._rows)[self._late_there]
        return bool(torch.equal(found, wanted))


def _measure(
    pieces: _Pieces, memory: Any, expected: Any, operation: str, repeats: int
) -> tuple[float, float, bool]:
    timed, right = [], True
    if operation == "READ":
        for _ in range(repeats):
            memory.zero_()
            timed.append(pieces.move("READ"))
            right = pieces.holds(expected) and right
        return *min(timed), right
    # Write other content, read it back, and restore the original.
    other = expected ^ 255
    pieces.put(other)
    timed = [pieces.move("WRITE") for _ in range(repeats)]
    memory.zero_()
    pieces.move("READ")
    right = pieces.holds(other)
    pieces.put(expected)
    pieces.move("WRITE")
    return *min(timed), right


def _pattern(device: str, size: int, seed: int) -> Any:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device, generator=generator)


def _settle(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def _kind(device: str) -> str:
    return "DRAM" if device == "cpu" else "VRAM"
