"""KV hand-off from one vLLM to another, by its NIXL connector in pull mode.

The prefill leg requests that vLLM keeps its blocks, and receives parameters: their location and owner. The decode leg passes
the parameters to its own vLLM, which reads the blocks and notifies the owner to free them. vLLM does not check that
parameters are used once, or for their own prompt: used ones yield the present content of those blocks. So this module
rejects incomplete parameters (which hang the request, or end the engine), and parameters that this engine has used before;
the worker ensures that no other engine receives them. On the way they are sealed (`headwater.engines.handoff_params`).
"""

from collections import OrderedDict
from typing import Any

import msgspec

from headwater.engines.engine import Pinned
from headwater.engines.handoff_params import Unusable
from headwater.engines.model_files import model_digest
from headwater.engines.vllm.connectors import can_hand_over, handoff_options
from headwater.schemas.addresses import host_port

LEASE_S = 30
"""VLLM's own default of `kv_lease_duration`."""

MARGIN = 1 / 3
"""Part of the lease reserved for the transport to the other engine, which renews it from then on."""

REMEMBERED = 65_536
"""Bound on recorded used hand-offs."""

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
        lease = float(_nixl(config, "kv_lease_duration") or extra.get("kv_lease_duration") or LEASE_S)
        self.lease_s = lease * (1 - MARGIN)
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()

    def hand_over(self) -> dict[str, Any]:
        """Parameters of a prefill leg."""
        return dict(PREFILL)

    def pinned(self, returned: dict[str, Any] | None) -> Pinned | None:
        """The KV pinned by a prefill leg, None if it cannot be fetched."""
        if not returned:
            return None
        params = msgspec.json.encode(returned)
        try:
            made = _checked(params)
        except Unusable:
            return None
        return Pinned(params, self.lease_s, place=host_port(made.remote_host, made.remote_port))

    def fetch(self, params: bytes) -> dict[str, Any]:
        """Parameters of the decode leg. Raises `Unusable`: incomplete, or used before."""
        checked = _checked(params)
        key = (checked.remote_engine_id, checked.remote_request_id)
        if key in self._seen:
            raise Unusable("it was already used")
        self._seen[key] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        whole: dict[str, Any] = msgspec.json.decode(params)
        # With it vLLM reports the prefill's cached tokens as the decode's own, which were all fetched.
        whole.pop("remote_prefill_cached_tokens", None)
        return whole


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


def _nixl(config: Any, key: str) -> Any:
    return (handoff_options(config) or {}).get(key)
