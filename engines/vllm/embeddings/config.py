"""VLLM's configuration of its encoder cache connector."""

from typing import Any, Final

CONNECTOR: Final = "headwater.engines.vllm.embeddings.connector"


def transfer_config(role: str, folder: Any) -> Any:
    """VLLM's `ECTransferConfig` for embeddings in a folder. `role`: "ec_producer" or "ec_consumer"."""
    from vllm.config.ec_transfer import ECTransferConfig

    return ECTransferConfig(
        ec_connector="EmbeddingConnector",
        ec_connector_module_path=CONNECTOR,
        ec_role=role,
        ec_connector_extra_config={"folder": str(folder)},
    )
