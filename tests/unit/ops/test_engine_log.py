"""Causes in what engines say when they do not start, in the words of their users' reports."""

import pytest

from headwater.ops.diagnosis import LINE_CHARACTERS, explain_engine_log

NOISE = "INFO 11-26 10:00:00 [core.py:70] Initializing a V1 LLM engine\n" * 50
AFTER = "\nRuntimeError: Engine core initialization failed. See root cause above.\n" * 3


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has 79.1 GiB", "engine-memory"),
        (
            "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger "
            "than the available KV cache memory (10.2 GiB). Try increasing `gpu_memory_utilization`",
            "engine-memory",
        ),
        (
            "ValueError: Free memory on device (3.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB).",
            "engine-memory",
        ),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "engine-memory"),
        ("RuntimeError: No CUDA GPUs are available", "engine-cuda"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 12020).", "engine-cuda"),
        ("ImportError: libcudart.so.13: cannot open shared object file: No such file or directory", "engine-cuda"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "engine-cuda"),
        ("RuntimeError: Failed to infer device type, please set the environment variable", "engine-cuda"),
        ("ModuleNotFoundError: No module named 'nixl'", "engine-connector"),
        ("ModuleNotFoundError: No module named 'kvbm'", "engine-connector"),
        ("RuntimeError: NIXL is not available", "engine-connector"),
        ("ValueError: Unsupported connector type: DynamoConnector", "engine-connector"),
        ("kvbm leader: barrier failed: timed out waiting for workers", "engine-connector"),
        ("zmq.error.ZMQError: Address already in use (addr='tcp://*:5557')", "engine-port"),
        ("OSError: [Errno 98] Address already in use", "engine-port"),
        ("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500", "engine-port"),
    ],
)  # fmt: skip
def test_the_cause_is_found_among_other_lines(line: str, wanted: str) -> None:
    """Exactly one, with the line that says it."""
    (found,) = explain_engine_log(f"{NOISE}{line}{AFTER}", "worker-0")
    assert (found.id, found.about) == (wanted, "worker-0")
    assert found.text.strip("…") in line
    assert found.remedy


def test_a_log_without_a_known_cause_says_nothing() -> None:
    """Neither does a log of an engine that started with a connector."""
    assert explain_engine_log(NOISE + AFTER, "w") == []
    assert (
        explain_engine_log("INFO Creating v1 connector with name: NixlConnector and engine_id: 1\n", "w")
        == []
    )
    assert (
        explain_engine_log("INFO Available KV cache memory: 55.1 GiB\nINFO Maximum concurrency: 12.5x", "w")
        == []
    )


def test_a_long_line_is_cut_around_the_cause() -> None:
    """It is shown with what is before it."""
    (found,) = explain_engine_log("x" * 5000 + " CUDA out of memory " + "y" * 5000, "w")
    assert "CUDA out of memory" in found.text
    assert len(found.text) <= LINE_CHARACTERS + 2


def test_several_causes_come_in_the_order_of_the_log() -> None:
    """The first is most often the cause of the others."""
    found = explain_engine_log("Address already in use\nCUDA out of memory\n", "w")
    assert [one.id for one in found] == ["engine-port", "engine-memory"]
