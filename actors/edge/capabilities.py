"""What a model's engine can do, as its card says it."""

from headwater.actors.edge.errors import bad_request
from headwater.engines.engine import Capability
from headwater.schemas.card import ModelCard


def require(card: ModelCard, capability: Capability, param: str) -> None:
    """Raises `ApiError` 400 naming the field and the capability that the engine lacks."""
    if capability not in card.capabilities:
        raise bad_request(
            f"{param} can not be had from {card.name}: its engine, {card.engine}, has no capability {capability!r}.",
            param=param,
        )


def require_generation(card: ModelCard) -> None:
    """Raises `ApiError` 400 for a model that only pools."""
    if "generate" not in card.capabilities:
        raise bad_request(f"{card.name} generates nothing: use /v1/embeddings.", param="model")


def pooling_task(card: ModelCard, *tasks: str) -> str:
    """The first of these tasks that the model pools for. Raises `ApiError` 400."""
    offered = (card.pooling_tasks or ("embed",)) if "embed" in card.capabilities else ()
    for task in tasks:
        if task in offered:
            return task
    if not offered:
        raise bad_request(f"{card.name} pools nothing: use /v1/chat/completions.", param="model")
    raise bad_request(
        f"{card.name} is not for this: it pools for {', '.join(offered)}, not for {' or '.join(tasks)}.",
        param="model",
    )
