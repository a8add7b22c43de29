"""What the double returns of an answer."""

from typing import Any


class Output:
    """`CompletionOutput`: token ids are cumulative."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Any]] = []
        self.finish_reason: str | None = None
        self.disaggregated_params: Any = None


class Logprob:
    """Its value."""

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob
