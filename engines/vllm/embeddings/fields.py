"""What a model needs of an image or a video besides its embedding, as vLLM names it."""

from typing import Any


def fields_resolver(model_config: Any) -> Any:
    """What names a model's placeholder fields; None in releases without, whose consumers need the pixels too."""
    try:
        from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
    except ImportError:
        return None
    return PlaceholderMetadataResolver(model_config)


def frames_have_times(model_config: Any) -> bool:
    """Do the positions of a video's tokens depend on the times of its frames, as in Qwen2.5-VL? Then its grid is not enough."""
    vision = getattr(model_config.hf_config, "vision_config", None)
    return getattr(vision, "tokens_per_second", None) is not None
