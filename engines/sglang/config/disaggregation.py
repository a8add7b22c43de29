"""What an SGLang that only prefills or only decodes is started with."""

import socket
from collections.abc import Mapping
from typing import Any, Final, Literal

from headwater.engines.engine import EngineUnavailable
from headwater.schemas.events.fleet import Role

Mode = Literal["prefill", "decode"]

ENVIRONMENT: Final[Mapping[str, str]] = {
    # SGLang's default, 5 s, twice: a dead prefill engine is noticed after 10 s. 2 s is the least that it takes.
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    # Else UCX keeps the GPU memory of a dead prefill engine mapped, and it could not start again.
    "UCX_CUDA_IPC_CACHE": "n",
}
CPU_ENVIRONMENT: Final[Mapping[str, str]] = {
    # It uses CUDA events, also without CUDA.
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"
}


def mode_of(role: Role, native: Mapping[str, Any]) -> Mode | None:
    """The mode of an engine whose worker has this role, None for whole requests. Raises `EngineUnavailable`."""
    given = native.get("disaggregation_mode")
    # An encode worker has no KV.
    wanted: Mode | None = None if role == "both" or role == "encode" else role
    if given is not None and given != (wanted or "null"):
        raise EngineUnavailable(
            f"--role {role} and, among SGLang's own arguments, --disaggregation-mode {given} disagree: omit the latter"
        )
    if wanted is not None and int(native.get("dp_size") or 1) > 1:
        raise EngineUnavailable(
            f"--role {role} with --dp-size {native['dp_size']} is not implemented: start one worker for each rank"
        )
    return wanted


def arguments(mode: Mode | None, host: str, port: int, *, cpu: bool) -> dict[str, Any]:
    """Arguments of an engine that prefills or decodes. `host` is where other workers reach it."""
    if mode is None:
        return {}
    found: dict[str, Any] = {
        "disaggregation_mode": mode,
        "disaggregation_transfer_backend": "nixl",
        "host": host,
        "disaggregation_bootstrap_port": port,
    }
    if cpu and mode == "decode":
        # Where requests go that are retracted for lack of memory; its default needs CUDA.
        found["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    return found


def environment(host: str, *, cpu: bool) -> dict[str, str]:
    """Environment variables of an engine that prefills or decodes."""
    return {"SGLANG_HOST_IP": host, **ENVIRONMENT, **(CPU_ENVIRONMENT if cpu else {})}


def free_port(host: str) -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
