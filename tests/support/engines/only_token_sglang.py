"""A logits processor for SGLang as its users write them: `only` leaves one token possible."""

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from headwater.engines.sglang import sampling


class OnlyToken(CustomLogitProcessor):  # type: ignore[misc]
    """The request's argument `token` is the only one that can be chosen."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """Change the rows of the requests that use it."""
        for row, params in enumerate(custom_param_list or []):
            token = int(sampling.arguments(params)["token"])
            if token < 0:
                # A mistake in a user's class ends the engine.
                raise LookupError(f"no token {token}")
            kept = logits[row, token].clone()
            logits[row] = float("-inf")
            logits[row, token] = kept
        return logits
