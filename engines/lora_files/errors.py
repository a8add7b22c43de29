"""Errors of LoRA adapters, with the status of the control reply."""

from headwater.engines.engine import EngineError


class LoraError(EngineError):
    """An adapter cannot be fetched or loaded. `status` follows HTTP, as in `schemas.messages.control`."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class SourceMissing(LoraError):
    """The file does not exist at the source."""

    def __init__(self, what: str) -> None:
        super().__init__(404, f"there is no {what}")
