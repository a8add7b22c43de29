"""KV connectors by short names: `--connector nixl,offload` as vLLM's KVTransferConfig. Pure.

The order is the one in which they are asked for blocks; all of them are given blocks to keep.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headwater.engines.engine import EngineUnavailable

Options = Mapping[str, Mapping[str, Any]]


class Connector(NamedTuple):
    """A connector of vLLM's, or of a package of its own (`module`).

    `hands_over`: it moves KV between a prefill and a decode worker. `needs` are options that it can not do without,
    each with an example; `gives` are options that it has unless others are given.
    """

    name: str
    module: str = ""
    hands_over: bool = False
    needs: tuple[tuple[str, str], ...] = ()
    gives: Mapping[str, Any] = {}


CONNECTORS: dict[str, Connector] = {
    "nixl": Connector("NixlConnector", hands_over=True),
    # Without that, what it tells of blocks in host memory names neither their tokens nor their parents.
    "offload": Connector(
        "OffloadingConnector",
        needs=(("cpu_bytes_to_use", "8589934592"),),
        gives={"self_describing_kv_events": True},
    ),
    "simple-offload": Connector("SimpleCPUOffloadConnector"),
    "lmcache": Connector("LMCacheConnectorV1"),
    "kvbm": Connector("DynamoConnector", "kvbm.vllm_integration.connector"),
    # vLLM's default folder is /tmp: prompts' KV would lie open there.
    "example": Connector("ExampleConnector", needs=(("shared_storage_path", '"/var/lib/headwater/kv"'),)),
}
"""By the name on the command line."""

NOT_SUPPORTED = {
    "mooncake": "its workers find each other by a server of its own, which no worker here asks; use nixl",
    "nixl-push": "its decode worker must be known before the prefill, and here it is chosen after; use nixl",
}
"""Connectors of vLLM's between prefill and decode whose hand-off differs from the one there is."""

_FIELDS = frozenset(
    {
        "engine_id",
        "kv_buffer_device",
        "kv_role",
        "kv_port",
        "kv_connector_module_path",
        "enable_permute_local_kv",
        "kv_load_failure_policy",
    }
)
"""Options that are KVTransferConfig's own; all others are the connector's extra configuration."""


def names(text: str) -> tuple[str, ...]:
    """The connectors in a list with commas; `none` is none. Raises `EngineUnavailable`."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in found:
        if name in NOT_SUPPORTED:
            raise EngineUnavailable(f"--connector {name} is not supported: {NOT_SUPPORTED[name]}")
        if name != "none" and name not in CONNECTORS:
            raise EngineUnavailable(
                f"--connector {name}: unknown; known are {', '.join(CONNECTORS)} and none"
            )
    if "none" in found and len(found) > 1:
        raise EngineUnavailable(f"--connector {text}: none beside others; leave out one or the other")
    if len(set(found)) != len(found):
        raise EngineUnavailable(f"--connector {text}: each connector once, please")
    return () if found == ("none",) else found


def hands_over(chosen: Sequence[str]) -> bool:
    """Is one of these a connector between prefill and decode?"""
    return any(CONNECTORS[name].hands_over for name in chosen)


def transfer_config(chosen: Sequence[str], options: Options, *, cpu: bool) -> dict[str, Any] | None:
    """The fields of KVTransferConfig, None for no connector. Raises `EngineUnavailable` for options that fit none.

    The role is `kv_both` always: what a worker does is said per request, and may change while it runs.
    """
    stray = sorted(set(options) - set(chosen))
    if stray:
        raise EngineUnavailable(
            f"--connector-options has options for {stray[0]}, which --connector does not list: add it there or "
            "take them out"
        )
    configs = [_config(name, options.get(name, {}), cpu=cpu) for name in chosen]
    if not configs:
        return None
    if len(configs) == 1:
        return configs[0]
    several: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": configs},
    }
    if cpu:
        several["kv_buffer_device"] = "cpu"
    return several


def _config(name: str, options: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
    connector = CONNECTORS[name]
    for option, example in connector.needs:
        if option not in options:
            raise EngineUnavailable(
                f"--connector {name} needs {option}: give --connector-options "
                f'\'{{"{name}": {{"{option}": {example}}}}}\', or a table [connector_options.{name}] in --config'
            )
    config: dict[str, Any] = {"kv_connector": connector.name, "kv_role": "kv_both"}
    if connector.module:
        config["kv_connector_module_path"] = connector.module
    if cpu:
        # Elsewhere vLLM takes the accelerator's memory by itself.
        config["kv_buffer_device"] = "cpu"
    options = {**connector.gives, **options}
    config |= {key: value for key, value in options.items() if key in _FIELDS}
    extra = {key: value for key, value in options.items() if key not in _FIELDS}
    if extra:
        config["kv_connector_extra_config"] = extra
    return config
