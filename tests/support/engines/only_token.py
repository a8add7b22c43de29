"""A logits processor for vLLM as its users write them: `only` leaves one token possible."""

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from headwater.engines.vllm import sampling

NAME = "only"


class OnlyToken(AdapterLogitsProcessor):  # type: ignore[misc]
    """The request's argument `token` is the only one that can be chosen."""

    def is_argmax_invariant(self) -> bool:
        """It changes what is likeliest."""
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """What to apply to a request's logits, None if it does not use this."""
        given = sampling.arguments(params, NAME)
        if given is None:
            return None
        token = int(given["token"])
        if token < 0:
            # A mistake in a user's class ends the engine.
            raise LookupError(f"no token {token}")

        def apply(_output: list[int], logits: torch.Tensor) -> torch.Tensor:
            kept = logits[token].clone()
            logits.fill_(float("-inf"))
            logits[token] = kept
            return logits

        return apply
