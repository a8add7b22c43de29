"""A stop while vLLM loads: data-parallel ranks that wait for each other, for ever."""

import signal
from pathlib import Path

import pytest

from headwater.ops.process.sockets import free_port
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.processes.loading import end_while_loading

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(300),
]

CORE = "VLLM::EngineCor"
"""A process's name has 15 characters."""


@pytest.mark.parametrize(
    ("command", "own", "number", "code"),
    [
        ("up", (), signal.SIGTERM, 0),
        ("engine", ("--headless", "--data-parallel-start-rank", "1"), signal.SIGTERM, 0),
        ("engine", ("--headless", "--data-parallel-start-rank", "1"), signal.SIGHUP, 0),
    ],
    ids=["a leader without its rank", "a rank without its leader", "a rank and SIGHUP"],
)
async def test_a_signal_ends_it_with_all_its_processes(
    tmp_path: Path, command: str, own: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    """Within seconds, although vLLM's constructor blocks the process's event loop."""
    fleet = ("--port", "0", "--nats-port", "0", "--data-dir", str(tmp_path / "data"), "--workers", "1")
    start = ("up", "--engine", "vllm", *fleet) if command == "up" else ("engine", "vllm")
    flags: tuple[str, ...] = ("--model", str(tiny_vision_model.ensure()), "--served-model-name", "tiny")
    flags += ("--max-model-len", "1024", "--kv-cache-mib", "64")
    ranks: tuple[str, ...] = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
    ranks += ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port(0)))
    arguments = (*start, *flags, "--", *ranks, *own)
    ended = await end_while_loading(tmp_path, *arguments, number=number, process_name=CORE, vllm=True)
    assert ended == code
