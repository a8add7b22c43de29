"""KV connectors by short names: `--connector nixl,offload` as vLLM's KVTransferConfig. Pure.

Connectors are queried for blocks in this order; all of them receive blocks to store.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headwater.engines.engine import EngineUnavailable

Options = Mapping[str, Mapping[str, Any]]


class Connector(NamedTuple):
    """A connector of vLLM, or of another package (`module`).

    `hands_over`: it moves KV from a prefill to a decode worker. `needs` are required options, each with an example;
    `gives` are default options. `not_run` says how far the project's own tests have not used it.
    """

    name: str
    module: str = ""
    hands_over: bool = False
    needs: tuple[tuple[str, str], ...] = ()
    gives: Mapping[str, Any] = {}
    not_run: str = ""


CONNECTORS: dict[str, Connector] = {
    "nixl": Connector("NixlConnector", hands_over=True),
    # Without it, events of blocks in host memory contain neither tokens nor parents.
    "offload": Connector(
        "OffloadingConnector",
        needs=(("cpu_bytes_to_use", "8589934592"),),
        gives={"self_describing_kv_events": True},
    ),
    "simple-offload": Connector("SimpleCPUOffloadConnector", not_run="it was never started"),
    "lmcache": Connector(
        "LMCacheConnectorV1",
        not_run="LMCache 0.5.6 starts and answers on a CPU, where it caches nothing; it was never started on a GPU",
    ),
    "kvbm": Connector("DynamoConnector", "kvbm.vllm_integration.connector", not_run="it was never started"),
    # vLLM's default folder is /tmp, where other users could read the KV of prompts.
    "example": Connector("ExampleConnector", needs=(("shared_storage_path", '"/var/lib/headwater/kv"'),)),
}
"""The connectors by their names on the command line."""

PULLING = frozenset({"NixlConnector", "NixlPullConnector"})
"""vLLM's connectors by which a decode worker reads the KV of a prefill worker."""

NOT_SUPPORTED = {
    "mooncake": "its workers discover each other by its own server, which Headwater does not use; use nixl",
    "nixl-push": "its decode worker must be known before the prefill, and is chosen after it here; use nixl",
}
"""vLLM's hand-off connectors with an unsupported protocol, and the alternative."""

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
"""Fields of KVTransferConfig; all other options are the connector's extra configuration."""


def names(text: str) -> tuple[str, ...]:
    """The connectors in a comma-separated list; `none` for none. Raises `EngineUnavailable`."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in found:
        if name in NOT_SUPPORTED:
            raise EngineUnavailable(f"--connector {name} is not supported: {NOT_SUPPORTED[name]}")
        if name != "none" and name not in CONNECTORS:
            raise EngineUnavailable(
                f"--connector {name}: unknown; known are {', '.join(CONNECTORS)} and none"
            )
    if "none" in found and len(found) > 1:
        raise EngineUnavailable(f"--connector {text}: none together with others; omit one or the other")
    if len(set(found)) != len(found):
        raise EngineUnavailable(f"--connector {text}: name each connector once")
    return () if found == ("none",) else found


def hands_over(chosen: Sequence[str]) -> bool:
    """Does one of these hand KV over from prefill to decode?"""
    return any(CONNECTORS[name].hands_over for name in chosen)


def transfer_config(chosen: Sequence[str], options: Options, *, cpu: bool) -> dict[str, Any] | None:
    """The fields of KVTransferConfig, None for no connector. Raises `EngineUnavailable` for options of no connector.

    The role is always `kv_both`: a worker's role is set per request, and may change while it runs.
    """
    stray = sorted(set(options) - set(chosen))
    if stray:
        raise EngineUnavailable(
            f"--connector-options has options for {stray[0]}, which --connector does not list: add it there or "
            "remove them"
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
                f"--connector {name} requires {option}: set --connector-options "
                f'\'{{"{name}": {{"{option}": {example}}}}}\', or a table [connector_options.{name}] in --config'
            )
    config: dict[str, Any] = {"kv_connector": connector.name, "kv_role": "kv_both"}
    if connector.module:
        config["kv_connector_module_path"] = connector.module
    if cpu:
        # Elsewhere vLLM selects the accelerator's memory itself.
        config["kv_buffer_device"] = "cpu"
    options = {**connector.gives, **options}
    config |= {key: value for key, value in options.items() if key in _FIELDS}
    extra = {key: value for key, value in options.items() if key not in _FIELDS}
    if extra:
        config["kv_connector_extra_config"] = extra
    return config


def may_hand_over(text: str) -> bool:
    """Does a KV transfer configuration, as JSON, name a connector that hands over? What is no JSON, the engine's parser judges."""
    try:
        found = json.loads(text)
        inner = (found.get("kv_connector_extra_config") or {}).get("connectors") or ()
        names = [found.get("kv_connector"), *(one.get("kv_connector") for one in inner)]
    except (ValueError, AttributeError, TypeError):
        return True
    # One of another package is loaded from its own module: what it can shows when it is started.
    return bool(found.get("kv_connector_module_path")) or any(name in PULLING for name in names)


def can_hand_over(config: Any) -> bool:
    """Does one of the connectors in vLLM's configuration hand KV over?"""
    return handoff_options(config) is not None


def handoff_options(config: Any) -> dict[str, Any] | None:
    """Options of the connector that hands over, None without one; `MultiConnector` has a list of connectors."""
    transfer = getattr(config, "kv_transfer_config", None)
    if transfer is None:
        return None
    extra: dict[str, Any] = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector in PULLING:
        return extra
    if transfer.kv_connector == "MultiConnector":
        for inner in extra.get("connectors", ()):
            if inner.get("kv_connector") in PULLING:
                found: dict[str, Any] = inner.get("kv_connector_extra_config") or {}
                return found
    return None
