"""KV connectors by short names, and KV hand-off from one vLLM to another by its NIXL connector in pull mode.

`--connector nixl,offload` becomes vLLM's KVTransferConfig. Connectors are queried for blocks in this order; all of them receive blocks to
store.

The prefill leg requests that vLLM keeps its blocks, and receives parameters: their location and owner. The decode leg passes
the parameters to its own vLLM, which reads the blocks and notifies the owner to free them. vLLM does not check that
parameters are used once, or for their own prompt: used ones yield the present content of those blocks. So this module
rejects incomplete parameters (which hang the request, or end the engine), and parameters that this engine has used before;
the worker ensures that no other engine receives them. On the way they are sealed (`headwater.engines.engine.seal`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headwater.engines.engine import EngineUnavailable, Pinned, Unusable, UsedHandoffs
from headwater.engines.model_files import model_digest
from headwater.schemas.names import host_port

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
    connectors = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in connectors:
        if name in NOT_SUPPORTED:
            raise EngineUnavailable(f"--connector {name} is not supported: {NOT_SUPPORTED[name]}")
        if name != "none" and name not in CONNECTORS:
            raise EngineUnavailable(
                f"--connector {name}: unknown; known are {', '.join(CONNECTORS)} and none"
            )
    if "none" in connectors and len(connectors) > 1:
        raise EngineUnavailable(f"--connector {text}: none together with others; omit one or the other")
    if len(set(connectors)) != len(connectors):
        raise EngineUnavailable(f"--connector {text}: name each connector once")
    return () if connectors == ("none",) else connectors


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
        document = json.loads(text)
        inner = (document.get("kv_connector_extra_config") or {}).get("connectors") or ()
        connectors = [document.get("kv_connector"), *(connector.get("kv_connector") for connector in inner)]
    except (ValueError, AttributeError, TypeError):
        return True
    # One of another package is loaded from its own module: what it can shows when it is started.
    return bool(document.get("kv_connector_module_path")) or any(name in PULLING for name in connectors)


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
                options: dict[str, Any] = inner.get("kv_connector_extra_config") or {}
                return options
    return None


LEASE_S = 30
"""VLLM's own default of `kv_lease_duration`."""

MARGIN = 1 / 3
"""Part of the lease reserved for the transport to the other engine, which renews it from then on."""

PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Fetch(msgspec.Struct):
    """Required parameters of a fetch. Further ones are passed on unchanged."""

    do_remote_prefill: bool
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[int | list[int]]
    """A list for each cache group; older releases, with only one group, have that list alone."""
    tp_size: int


class VllmHandoffs:
    """Creates and validates hand-off parameters of one engine."""

    def __init__(self, config: Any) -> None:
        extra = getattr(config.kv_transfer_config, "kv_connector_extra_config", None) or {}
        own = (handoff_options(config) or {}).get("kv_lease_duration")
        lease = float(own or extra.get("kv_lease_duration") or LEASE_S)
        self.lease_s = lease * (1 - MARGIN)
        self._used = UsedHandoffs()

    def pinned(self, returned: dict[str, Any] | None) -> Pinned | None:
        """The KV pinned by a prefill leg, None if it cannot be fetched."""
        if not returned:
            return None
        params = msgspec.json.encode(returned)
        try:
            checked_params = _checked(params)
        except Unusable:
            return None
        return Pinned(
            params, self.lease_s, place=host_port(checked_params.remote_host, checked_params.remote_port)
        )

    def fetch(self, params: bytes) -> dict[str, Any]:
        """Parameters of the decode leg. Raises `Unusable`: incomplete, or used before."""
        checked = _checked(params)
        self._used.use((checked.remote_engine_id, checked.remote_request_id))
        transfer_params: dict[str, Any] = msgspec.json.decode(params)
        # With it vLLM reports the prefill's cached tokens as the decode's own, which were all fetched.
        transfer_params.pop("remote_prefill_cached_tokens", None)
        return transfer_params


def _checked(params: bytes) -> Fetch:
    try:
        checked = msgspec.json.decode(params, type=Fetch)
    except msgspec.DecodeError as error:
        raise Unusable(str(error)) from error
    if not checked.do_remote_prefill:
        raise Unusable("it requests no remote prefill")
    if not checked.remote_engine_id or not checked.remote_request_id or not checked.remote_host:
        raise Unusable("it does not name the owner of the blocks")
    if all(group == [] for group in checked.remote_block_ids):
        raise Unusable("it names no blocks")
    return checked


def pairs_with(config: Any, name: str, version: str) -> str:
    """See `EngineInfo.pairs_with`. Empty without such a connector.

    Two engines with equal values pass vLLM's own check, which compares the exact version, the model's path and the types.
    """
    if not can_hand_over(config):
        return ""
    model, cache = config.model_config, config.cache_config
    dtype = str(model.dtype).removeprefix("torch.")
    return f"vllm/{version}/{name}-{model_digest(str(model.model))}/{dtype}/{cache.cache_dtype}"
