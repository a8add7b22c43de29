"""A stop while an engine loads: data-parallel ranks of vLLM, or nodes of SGLang, that wait for each other, for ever."""

import signal
from pathlib import Path
from typing import Any

import pytest

from headwater.ops.start.children import child_environment
from headwater.ops.start.sockets import free_port
from tests.engines.cases import SGLANG, VLLM, Case
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.processes.loading import end_while_loading

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

LOADING = {"vllm": "VLLM::EngineCor", "sglang": "sglang::schedul"}
"""The process that waits. A process's name has 15 characters."""

SOAK = (pytest.mark.soak,)
"""In every run there is SGLang's: vLLM needs half a minute of processor time until its leader waits."""

RANK = ("--headless", "--data-parallel-start-rank", "1")


def own(case: Case, *more: str) -> tuple[str, ...]:
    """An engine's own arguments for two that wait for each other."""
    port = str(free_port(0))
    if case is VLLM:
        ranks = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
        address = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port)
        return ("--native=--kv-cache-memory-bytes=67108864", "--", *ranks, *address, *more)
    return ("--", "--tp-size=2", "--nnodes=2", f"--dist-init-addr=127.0.0.1:{port}", *more)


@pytest.mark.parametrize(
    ("case", "command", "more", "number", "code"),
    [
        VLLM.param("up", (), signal.SIGTERM, 0, name="a leader without its rank", marks=SOAK),
        VLLM.param("engine", RANK, signal.SIGTERM, 143, name="a rank without its leader", marks=SOAK),
        VLLM.param("engine", RANK, signal.SIGHUP, 129, name="a rank and SIGHUP", marks=SOAK),
        SGLANG.param("up", ("--node-rank=0",), signal.SIGTERM, 0, name="the first node", marks=SOAK),
        SGLANG.param("engine", ("--node-rank=1",), signal.SIGTERM, 143, name="the second node"),
    ],
)
async def test_a_signal_ends_it_with_all_its_processes(
    tmp_path: Path, case: Case, command: str, more: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    """Within seconds, although the engine's constructor blocks the process's event loop."""
    fleet = ("--port", "0", "--nats-port", "0", "--data-dir", str(tmp_path / "data"), "--workers", "1")
    start = ("up", "--engine", case.engine, *fleet) if command == "up" else ("engine", case.engine)
    flags = ("--model", str(tiny_vision_model.ensure()), "--served-model-name", "tiny")
    arguments = (*start, *flags, "--max-model-len", "1024", *own(case, *more))
    # Without it SGLang refuses two ranks on a machine with one NUMA node.
    binding = {**child_environment(), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    engine: dict[str, Any] = {"vllm": True} if case is VLLM else {"sglang": True, "environ": binding}
    ended = await end_while_loading(
        tmp_path, *arguments, number=number, process_name=LOADING[case.engine], **engine
    )
    assert ended == code
