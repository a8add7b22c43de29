"""Settings of a hand-off by NIXL, and those that are compared."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple


class HandoffSetting(NamedTuple):
    """One way to run a prefill and a decode engine.

    `visible`: each process sees its `own` GPU only, or `both`, its own first. `threads`: NIXL's UCX threads.
    `cross_layers`: one contiguous piece for all layers of a block, instead of two (keys, values) per layer.
    """

    name: str
    visible: Literal["own", "both"] = "own"
    block_size: int = 16
    cross_layers: bool = False
    threads: int = 4
    eager: bool = True
    environ: Mapping[str, str] = MappingProxyType({})

    @property
    def label(self) -> str:
        """Name and block size."""
        return f"{self.name}/{self.block_size}"

    def extra_config(self) -> dict[str, Any]:
        """VLLM's `kv_connector_extra_config`."""
        return {"enable_cross_layers_blocks": str(self.cross_layers), "num_threads": self.threads}


UCX_SAYS = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}
"""Makes UCX print the transports of each connection and the protocol for each size."""

NVLINK_TLS = "cuda_ipc,cuda_copy,sm,tcp,self"

RUNNER_1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""vLLM 0.24 stores a block's layers contiguously only in its older model runner."""

BATCH_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
"""Kernels whose rounding does not depend on what else is in the batch."""

SETTINGS = {
    setting.name: setting
    for setting in (
        HandoffSetting("default"),
        HandoffSetting("all-tls", environ={"UCX_TLS": "all"}),
        HandoffSetting("both-visible", visible="both"),
        HandoffSetting("nvlink-tls", environ={"UCX_TLS": NVLINK_TLS}),
        HandoffSetting("get-zcopy", environ={"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}),
        HandoffSetting("ucx-debug", environ={"UCX_LOG_LEVEL": "debug"}),
        HandoffSetting("sgl", environ={"NIXL_UCX_SGL_ENABLE": "y"}),
        HandoffSetting("threads-0", threads=0),
        HandoffSetting("threads-16", threads=16),
        HandoffSetting("runner-1", environ=RUNNER_1),
        HandoffSetting("cross-layers", cross_layers=True, environ=RUNNER_1),
        HandoffSetting("cross-layers-0", cross_layers=True, threads=0, environ=RUNNER_1),
        HandoffSetting("graphs", eager=False),
        HandoffSetting("graphs-runner-1", eager=False, environ=RUNNER_1),
        HandoffSetting("graphs-invariant", eager=False, environ=BATCH_INVARIANT),
        HandoffSetting("cross-layers-graphs", cross_layers=True, eager=False, environ=RUNNER_1),
    )
}


def chosen(names: str, blocks: str) -> list[HandoffSetting]:
    """Settings by name, each with each block size; both with commas. `name/size` picks one pair.

    Raises ValueError naming the valid ones.
    """
    found = []
    for name in names.split(","):
        name, _, size = name.partition("/")
        if name not in SETTINGS:
            raise ValueError(f"no setting {name!r}; there are {', '.join(SETTINGS)}")
        for block in (size or blocks).split(","):
            found.append(SETTINGS[name]._replace(block_size=int(block)))
    return found
