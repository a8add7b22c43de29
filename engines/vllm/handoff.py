"""KV of one prompt from one vLLM to another, by its NIXL connector in pull mode.

The prefill leg asks vLLM to keep its blocks and gets a map back: where they are and who holds them. The decode leg
gives that map to its own vLLM, which fetches the blocks and tells the other side to let go of them. Nothing in
vLLM checks that such a map is used once, or for its own prompt: a used one is answered with whatever lies in those
blocks by then. So a map is refused here that is not whole (half of one hangs the request, or ends the engine), and
one that this engine has seen; that no other engine gets it is the worker's care.
"""

from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from headwater.engines.engine import Pinned

PULLING = frozenset({"NixlConnector", "NixlPullConnector"})
"""Connectors whose two legs are joined by the returned parameters."""

LEASE_S = 30
"""VLLM's own default of `kv_lease_duration`."""

MARGIN = 1 / 3
"""Part of the lease that is left for the way to the other engine; from then on that one renews it."""

REMEMBERED = 65_536
"""Hand-offs that an engine knows it has used."""

PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


class Fetch(msgspec.Struct):
    """What a map must have so that vLLM fetches by it. Anything more is passed on as it is."""

    do_remote_prefill: bool
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[int | list[int]]
    """A list for each cache group; older releases, which know one group, give that list alone."""
    tp_size: int


class Unusable(Exception):
    """The parameters of a hand-off can not be used; the message says why."""


class Handoffs:
    """Makes and checks the parameters of hand-offs of one engine."""

    def __init__(self, config: Any) -> None:
        extra = getattr(config.kv_transfer_config, "kv_connector_extra_config", None) or {}
        lease = float(_nixl(config, "kv_lease_duration") or extra.get("kv_lease_duration") or LEASE_S)
        self.lease_s = lease * (1 - MARGIN)
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()

    def hand_over(self) -> dict[str, Any]:
        """Parameters of a prefill leg."""
        return dict(PREFILL)

    def pinned(self, returned: dict[str, Any] | None) -> Pinned | None:
        """What the prefill leg left behind, None if that can not be fetched."""
        if not returned:
            return None
        params = msgspec.json.encode(returned)
        try:
            _checked(params)
        except Unusable:
            return None
        return Pinned(params, self.lease_s)

    def fetch(self, params: bytes) -> dict[str, Any]:
        """Parameters of the decode leg. Raises `Unusable`: not whole, or seen before."""
        checked = _checked(params)
        key = (checked.remote_engine_id, checked.remote_request_id)
        if key in self._seen:
            raise Unusable("it was used already")
        self._seen[key] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        whole: dict[str, Any] = msgspec.json.decode(params)
        # With it vLLM tells the prefill's cached tokens as the decode's own, which were all fetched.
        whole.pop("remote_prefill_cached_tokens", None)
        return whole


def _checked(params: bytes) -> Fetch:
    try:
        checked = msgspec.json.decode(params, type=Fetch)
    except msgspec.DecodeError as error:
        raise Unusable(str(error)) from error
    if not checked.do_remote_prefill:
        raise Unusable("it asks for no remote prefill")
    if not checked.remote_engine_id or not checked.remote_request_id or not checked.remote_host:
        raise Unusable("it does not say who holds the blocks")
    if all(group == [] for group in checked.remote_block_ids):
        raise Unusable("it names no blocks")
    return checked


def can_hand_over(config: Any) -> bool:
    """Is one of the connectors in vLLM's configuration one that hands over?"""
    return _connector(config) is not None


def pairs_with(config: Any, name: str, version: str) -> str:
    """See `EngineInfo.pairs_with`. Empty without such a connector.

    Two engines with equal names pass vLLM's own check, which takes the exact version, the model by its path and the
    types. The digest stands for path and weights: files of the same names and sizes are taken for the same.
    """
    if not can_hand_over(config):
        return ""
    model, cache = config.model_config, config.cache_config
    digest = blake2b(str(model.model).encode(), digest_size=6)
    folder = Path(str(model.model))
    if (folder / "config.json").is_file():
        digest.update((folder / "config.json").read_bytes())
    for pattern in _WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    dtype = str(model.dtype).removeprefix("torch.")
    return f"vllm/{version}/{name}-{digest.hexdigest()}/{dtype}/{cache.cache_dtype}"


def _connector(config: Any) -> dict[str, Any] | None:
    """Extra configuration of the connector that hands over; `MultiConnector` has a list of them."""
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


def _nixl(config: Any, key: str) -> Any:
    return (_connector(config) or {}).get(key)
