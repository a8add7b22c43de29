"""What a model needs of an image or a video besides its embedding, as vLLM names it."""

from typing import Any


def fields_resolver(model_config: Any) -> Any:
    """What names a model's placeholder fields; None in releases without, whose consumers need the pixels too."""
    try:
        from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
    except ImportError:
        return None
    return PlaceholderMetadataResolver(model_config)
