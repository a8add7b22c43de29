"""vLLM's side of embeddings in files, as its "encoder cache connector". vLLM imports this module in its engine process.

A producer writes each embedding that it computes. A consumer takes what is in the folder, and computes what is not: the worker
guarantees that a file stays as long as a request needs it.
"""

from pathlib import Path
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from headwater.engines import embeddings as embedding_files
from headwater.engines.media import PROBE_ID
from headwater.engines.vllm.encoder import fields_resolver

FOLDER = "folder"


class ItemsToLoad(ECConnectorMetadata):
    """What the workers load before the next step."""

    def __init__(self, identifiers: list[str]) -> None:
        self.identifiers = identifiers


class EmbeddingConnector(ECConnectorBase):
    """The connector; its methods are described by `ECConnectorBase`."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self._folder = Path(vllm_config.ec_transfer_config.get_from_extra_config(FOLDER, ""))
        self._fields = fields_resolver(vllm_config.model_config)
        self._to_load: list[str] = []

    def has_cache_item(self, identifier: str) -> bool:
        """Is there an embedding to load?"""
        return self.is_consumer and embedding_files.path_of(self._folder, identifier).exists()

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """The scheduler has found a place for the item."""
        identifier = request.mm_features[index].identifier
        if self.has_cache_item(identifier):
            self._to_load.append(identifier)

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        """Hand over what to load."""
        identifiers, self._to_load = self._to_load, []
        return ItemsToLoad(identifiers)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """A producer returns what a consumer needs besides the embedding: the placeholder fields of each item."""
        if not self.is_producer or self._fields is None:
            return False, None
        from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata

        return False, collect_ec_item_metadata(request.mm_features, self._fields) or None

    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """Load the items into the engine's cache."""
        from vllm.platforms import current_platform

        device = current_platform.device_type
        if current_platform.is_cuda_alike():
            device = f"{device}:{current_platform.current_device()}"
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ItemsToLoad)
        for identifier in metadata.identifiers:
            if identifier not in encoder_cache:
                encoder_cache[identifier] = embedding_files.read(self._folder, identifier, device)
                embedding_files.count(self._folder, embedding_files.LOADED)

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        """The engine has computed an embedding."""
        embedding_files.count(self._folder, embedding_files.ENCODED)
        if self.is_producer or mm_hash == PROBE_ID:
            embedding_files.write(self._folder, mm_hash, encoder_cache[mm_hash].detach().cpu())
