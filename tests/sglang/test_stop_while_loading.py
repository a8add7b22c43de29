"""A stop while SGLang loads: two nodes that wait for each other, for ever."""

import signal
from pathlib import Path

import pytest

from headwater.ops.fleet.child import child_environment
from headwater.ops.process.sockets import free_port
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.processes.loading import end_while_loading

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.xdist_group("sglang"),
    pytest.mark.timeout(300),
]

SCHEDULER = "sglang::schedul"
"""A process's name has 15 characters."""


@pytest.mark.parametrize(
    ("command", "node"), [("up", 0), ("engine", 1)], ids=["the first node", "the second node"]
)
async def test_a_signal_ends_it_with_all_its_processes(tmp_path: Path, command: str, node: int) -> None:
    """Within seconds, although SGLang's constructor blocks the process's event loop."""
    fleet = ("--port", "0", "--nats-port", "0", "--data-dir", str(tmp_path / "data"), "--workers", "1")
    start = ("up", "--engine", "sglang", *fleet) if command == "up" else ("engine", "sglang")
    flags: tuple[str, ...] = ("--model", str(tiny_vision_model.ensure()), "--served-model-name", "tiny")
    address = f"127.0.0.1:{free_port(0)}"
    nodes = ("--tp-size=2", "--nnodes=2", f"--node-rank={node}", f"--dist-init-addr={address}")
    arguments = (*start, *flags, "--max-model-len", "1024", "--", *nodes)
    # Without it SGLang refuses two ranks on a machine with one NUMA node.
    environ = {**child_environment(), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    ended = await end_while_loading(
        tmp_path,
        *arguments,
        number=signal.SIGTERM,
        process_name=SCHEDULER,
        sglang=True,
        environ=environ,
    )
    assert ended == 0
